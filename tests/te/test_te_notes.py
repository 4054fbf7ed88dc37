# SPDX-License-Identifier: Apache-2.0
"""Notes: short messages over links, in order, behind the data that they announce, and bounded."""

from __future__ import annotations

import contextlib
import itertools
import signal

import numpy as np
import pytest
from te_contract import TIMEOUT_S, Pair, Way, paired
from te_far import FarEngine, pattern, wait_until
from te_frames import NOTE_MAX, NOTE_PART_MAX, end, header, note
from te_frames import Kind as FrameKind
from te_raw import RawSource

import te
from te.peers import NOTE_BYTES_MAX


def taken(engine: te.Engine, count: int) -> list[te.Note]:
    """So many, once they have come."""
    found: list[te.Note] = []

    def has_all() -> bool:
        found.extend(engine.take_notes())
        return len(found) >= count

    wait_until(has_all, f"{count} notes")
    return found


def test_notes_come_once_and_in_order_and_name_their_sender(pair: Pair) -> None:
    assert NOTE_BYTES_MAX == NOTE_MAX
    sizes = (1, 2, NOTE_PART_MAX, NOTE_PART_MAX + 1, 3, NOTE_BYTES_MAX, 5)
    sent = [pattern(i, nbytes).tobytes() for i, nbytes in enumerate(sizes)]
    for one in sent:
        pair.peer.send_note(one)
    came = taken(pair.target, len(sent))
    assert [one.data for one in came] == sent
    assert {one.peer for one in came} == {(pair.source.id, pair.source.epoch)}
    pair.flush()
    assert pair.target.take_notes() == []
    assert pair.source.take_notes() == []


def test_notes_come_behind_the_data_that_they_announce(pair: Pair) -> None:
    nbytes = len(pair.dst)
    for turn in range(20):
        before = pair.dst.copy()
        pair.src[:] = turn
        transfer = pair.write(0, 0, nbytes)
        transfer.add_done_callback(lambda _, turn=turn: pair.peer.send_note(bytes([turn])))
        assert [one.data for one in taken(pair.target, 1)] == [bytes([turn])]
        pair.assert_moved(pair.dst, before, pair.src)


def test_notes_and_transfers_share_a_link(pair: Pair) -> None:
    numbers = range(2_000)
    transfers = []
    for i in numbers:
        pair.peer.send_note(i.to_bytes(2, "big") * 50)
        if i % 50 == 0:
            transfers.append(pair.write(0, 0, 1 << 20))
            transfers.append(pair.peer.read(pair.blocks_back(0, 0, 1 << 10)))
    came = [one.data for one in taken(pair.target, len(numbers))]
    assert came == [i.to_bytes(2, "big") * 50 for i in numbers]
    assert {one.wait(TIMEOUT_S) for one in transfers} == {te.Status.DONE}


@pytest.mark.slow
def test_what_nobody_takes_is_bounded_and_the_log_says_so(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one peer; it takes nothing from others."""
    with paired(way, 1) as pair, pair.make() as other:
        third = other.connect(pair.target.card())
        # So many that most have come by then, whatever the channel keeps.
        for i in range(60):
            data = bytes([i]) * (NOTE_BYTES_MAX - 100)
            wait_until(lambda data=data: is_accepted(pair.peer, data), "room for the next one")
        third.send_note(b"of another one")
        came: list[te.Note] = []

        def has_third() -> bool:
            came.extend(pair.target.take_notes())
            return any(one.data == b"of another one" for one in came)

        wait_until(has_third, "the other's note")
        ours = [one.data[0] for one in came if one.peer.id == pair.source.id]
        assert ours[:8] == list(range(8))
        assert ours == sorted(set(ours))
        assert "notes of peers were dropped" in caplog.text


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_so_many_notes_of_a_peer_are_kept_whatever_their_size(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And as many again once these were taken."""
    kept, numbers = 8_192, itertools.count(1)
    with te.Engine(te.Config(stall_timeout_s=TIMEOUT_S)) as target:
        source = RawSource(target.card(), transport)
        with source.sock:
            for turn in range(2):
                data = [i.to_bytes(2, "big") for i in range(kept + 3)]
                source.send(*(note(next(numbers), one) for one in data), end(1 + turn))
                source.ack()  # Of what comes behind the notes.
                assert [one.data for one in target.take_notes()] == data[:kept]
    assert caplog.text.count(": 3 notes of peers were dropped") == 2


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_notes_that_have_come_outlive_their_link(transport: str) -> None:
    """But for one of which only a part has come."""
    with te.Engine(te.Config(stall_timeout_s=TIMEOUT_S)) as target:
        source = RawSource(target.card(), transport)
        with source.sock:
            source.send(note(1, b"first"), note(2, b"second"), note(3, b"thi", 5), end(1))
            source.ack()  # Of what comes behind the notes.
        wait_until(lambda: not target.links(), "the link has ended")
        assert [one.data for one in target.take_notes()] == [b"first", b"second"]


def is_accepted(peer: te.Peer, data: bytes) -> bool:
    try:
        peer.send_note(data)
    except te.QueueFull:
        return False
    return True


@pytest.mark.parametrize("data", [b"", bytes(NOTE_BYTES_MAX + 1)])
def test_notes_of_other_sizes_are_refused(data: bytes) -> None:
    with te.Engine() as source, te.Engine() as target:
        peer = source.connect(target.card())
        with pytest.raises(ValueError, match="must have between 1 and"):
            peer.send_note(data)


def test_a_peer_that_has_gone_gets_no_notes(pair: Pair) -> None:
    pair.target.close()
    wait_until(lambda: not pair.peer.alive, "the link has ended")
    with pytest.raises(te.ConnectError, match="closed the connection"):
        pair.peer.send_note(b"x")


@pytest.mark.slow
def test_more_notes_than_wait_for_a_silent_peer_are_refused() -> None:
    """And the peer is alive when it goes on."""
    far = FarEngine()
    config = te.Config(stall_timeout_s=1000.0)
    with contextlib.closing(Ending(far)), te.Engine(config) as source:
        peer = source.connect(far.bytes_card())
        far.signal(signal.SIGSTOP)
        with pytest.raises(te.QueueFull, match="too many notes"):
            fill(peer)
        far.signal(signal.SIGCONT)
        wait_until(lambda: is_accepted(peer, b"x"), "room for one more")


def fill(peer: te.Peer) -> None:
    """Far more than channels keep."""
    for _ in range(10_000):
        peer.send_note(b"x" * 16_000)


class Ending:
    def __init__(self, far: FarEngine) -> None:
        self.close = far.end


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([note(1, b"ab", 3), note(2, b"c", 3)], "begins in the middle"),
        ([note(1, b"ab", 3), note(1, b"cd", 4)], "begins in the middle"),
        ([note(1, b"ab", 3), note(1, b"cd", 3)], "longer than it says"),
        ([note(2, b"ab"), note(2, b"ab")], "after a later one"),
        ([note(2, b"ab"), note(1, b"ab")], "after a later one"),
        ([note(0, b"ab")], "must be at least 1"),
        ([header(FrameKind.NOTE, total=1)], "must be between 1 and"),
        ([note(1, b"ab", NOTE_MAX + 1)], "must be between 1 and"),
        ([note(1, b"ab", 1)], "must be at least its count"),
    ],
)
def test_a_source_that_says_nonsense_loses_its_link(
    transport: str, frames: list[bytes], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with te.Engine(te.Config(stall_timeout_s=TIMEOUT_S)) as target, te.Engine() as friend:
        source = RawSource(target.card(), transport)
        with source.sock:
            for one in frames:
                source.send(one)
            wait_until(lambda: problem in caplog.text, problem)
        friend.connect(target.card()).send_note(b"still there")
        wait_until(
            lambda: any(one.data == b"still there" for one in target.take_notes()), "another's note"
        )


def test_a_peer_without_a_note_costs_nothing(pair: Pair) -> None:
    before = pair.target.stats().bytes_received
    pair.peer.send_note(np.arange(100, dtype=np.uint8).tobytes())
    taken(pair.target, 1)
    assert pair.target.stats().bytes_received == before  # They are no payload.
