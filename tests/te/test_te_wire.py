# SPDX-License-Identifier: Apache-2.0
"""The wire format: what is written is read, in whatever pieces, and nothing else is accepted."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import ProtocolViolation
from te.config import SEGMENT_BLOCKS_MAX, SEGMENT_BYTES_MAX
from te.transports.tcp import wire
from te.transports.tcp.wire import Abandon, Ack, AckStatus, End, FrameReader, Kind, Segment

U64S = st.integers(0, (1 << 64) - 1)
EVERY_KIND = frozenset(Kind)


def encode(frame: wire.Frame) -> bytes:
    if isinstance(frame, Segment):
        head = wire.encode_segment_header(
            frame.transfer, frame.tag, len(frame.landings), frame.nbytes
        )
        return head + frame.landings.tobytes()
    if isinstance(frame, End):
        return wire.encode_end(frame.transfer, frame.tag, frame.nbytes)
    if isinstance(frame, Abandon):
        return wire.encode_abandon(frame.transfer)
    return wire.encode_ack(frame.transfer, frame.status, frame.reason)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    rows = draw(st.lists(st.tuples(U64S, st.integers(1, 60_000)), min_size=1, max_size=8))
    landings = np.array(rows, wire.LANDING)
    return Segment(draw(U64S), draw(U64S), sum(row[1] for row in rows), landings)


FRAMES = st.one_of(
    segments(),
    st.builds(End, U64S, U64S, U64S),
    st.builds(Abandon, U64S),
    st.builds(Ack, U64S, st.sampled_from(AckStatus), st.text(max_size=100)),
)


def plain(frame: wire.Frame) -> tuple[object, ...]:
    if isinstance(frame, Segment):
        return frame.transfer, frame.tag, frame.nbytes, frame.landings.tolist()
    return (frame,)


def feed(reader: FrameReader, data: bytes, sizes: list[int]) -> list[wire.Frame]:
    """Gives the reader the data in pieces of the sizes, over and over."""
    frames, turn = [], 0
    while data:
        room = reader.room()
        assert len(room) > 0
        nbytes = min(len(room), len(data), sizes[turn % len(sizes)])
        room[:nbytes] = data[:nbytes]
        frame = reader.filled(nbytes)
        if frame is not None:
            frames.append(frame)
        data, turn = data[nbytes:], turn + 1
    return frames


@given(st.lists(FRAMES, max_size=5), st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_frames_survive_any_fragmentation(frames: list[wire.Frame], sizes: list[int]) -> None:
    reader = FrameReader(EVERY_KIND)
    read = feed(reader, b"".join(encode(frame) for frame in frames), sizes)
    assert [plain(frame) for frame in read] == [plain(frame) for frame in frames]
    assert reader.idle


@given(st.binary(max_size=400), st.sampled_from([wire.SOURCE_FRAMES, wire.DESTINATION_FRAMES]))
def test_garbage_is_a_violation_or_waits(data: bytes, accepts: frozenset[Kind]) -> None:
    with contextlib.suppress(ProtocolViolation):
        feed(FrameReader(accepts), data, [7, 64])


@given(FRAMES, st.integers(0, 31), st.integers(0, 255))
def test_a_corrupt_header_is_a_violation_or_a_bounded_frame(
    frame: wire.Frame, where: int, value: int
) -> None:
    data = bytearray(encode(frame))
    data[where] = value
    try:
        read = feed(FrameReader(EVERY_KIND), bytes(data), [1000])
    except ProtocolViolation:
        return
    for item in read:
        if isinstance(item, Segment):
            assert 1 <= len(item.landings) <= SEGMENT_BLOCKS_MAX
            assert int(item.landings["nbytes"].sum()) == item.nbytes <= SEGMENT_BYTES_MAX


def header(*fields: int) -> bytes:
    return wire.FRAME.pack(*fields)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (header(Kind.ACK, 0, 0, 0, 1, 0, 0), "kind 19 is not expected"),
        (header(99, 0, 0, 0, 1, 0, 0), "kind 99 is not expected"),
        (header(Kind.END, 0, 1, 0, 1, 0, 0), "reserved"),
        (header(Kind.END, 1, 0, 0, 1, 0, 0), "reserved"),
        (header(Kind.END, 0, 0, 3, 1, 0, 0), "3 blocks"),
        (header(Kind.SEGMENT, 0, 0, 0, 1, 0, 10), "0 blocks"),
        (header(Kind.SEGMENT, 0, 0, SEGMENT_BLOCKS_MAX + 1, 1, 0, 1 << 20), "1023 blocks"),
        (header(Kind.SEGMENT, 0, 0, 1, 1, 0, SEGMENT_BYTES_MAX + 1), "67108865 bytes"),
        (header(Kind.SEGMENT, 0, 0, 2, 1, 0, 1), "segment of 2 blocks of 1 bytes"),
        (header(Kind.SEGMENT, 0, 0, 1, 1, 0, 10) + bytes(8) + b"\x09" + bytes(7), "9 bytes in all"),
        (header(Kind.SEGMENT, 0, 0, 1, 1, 0, 10) + bytes(8) + b"\xff" * 8, "blocks of 1844"),
        (header(Kind.SEGMENT, 0, 0, 1, 1, 0, 10) + bytes(16), "blocks of 0 to 0 bytes"),
    ],
)
def test_lies_of_a_source(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        feed(FrameReader(wire.SOURCE_FRAMES), data, [1000])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (header(Kind.END, 0, 0, 0, 1, 0, 0), "kind 17 is not expected"),
        (header(Kind.ACK, 3, 0, 0, 1, 0, 0), "unknown status 3"),
        (header(Kind.ACK, 1, 0, 513, 1, 0, 0), "513 bytes"),
        (header(Kind.ACK, 1, 0, 1, 1, 0, 0) + b"\xff", "not UTF-8"),
    ],
)
def test_lies_of_a_destination(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        feed(FrameReader(wire.DESTINATION_FRAMES), data, [1000])


@given(st.text(min_size=300, max_size=600))
def test_long_reasons_are_cut_between_characters(reason: str) -> None:
    data = wire.encode_ack(1, AckStatus.REFUSED, reason)
    (ack,) = feed(FrameReader(wire.DESTINATION_FRAMES), data, [1000])
    assert isinstance(ack, Ack)
    assert reason.startswith(ack.reason)
    assert len(ack.reason.encode()) <= wire.REASON_BYTES_MAX


@given(st.integers(0, 65535), st.integers(0, 65535), st.binary(max_size=300))
def test_greetings_of_any_version(version: int, kind: int, body: bytes) -> None:
    reader = wire.GreetingReader()
    data = wire.GREETING.pack(wire.MAGIC, version, kind, len(body)) + body
    greetings = feed(reader, data, [5])  # type: ignore[arg-type]
    assert greetings == [wire.Greeting(version, kind, body)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "not a te engine: .*GET / HT"),
        (wire.GREETING.pack(wire.MAGIC, 1, 1, 5000), "greeting of 5000 bytes"),
    ],
)
def test_not_a_greeting(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolViolation, match=says):
        feed(wire.GreetingReader(), data, [1000])  # type: ignore[arg-type]
