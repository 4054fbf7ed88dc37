# SPDX-License-Identifier: Apache-2.0
"""The wire between ranks: everything comes back as it went in, and nothing else is taken."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import Topology
from bootstrap_server.ranks.matching import PageShare
from sglang_mooncake import messages
from sglang_mooncake.layout import ALONE, Buffers, Component, Layout, Place, Units, Verify
from sglang_mooncake.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    LinkReset,
    ListDigests,
    MessageError,
    RoomAbort,
    RoomComputed,
    RoomDiffers,
    RoomDigests,
    RoomFailed,
    RoomRequest,
    RoomWait,
    Target,
    VersionMismatch,
)

LAYOUT = Layout(1, "float32", None, (), *[Buffers((), (), ())] * 2)
EMPTY = {"which": 0, "positions": b"", "of_items": b"", "of_buffers": bytes(8)}
u64 = st.integers(0, 2**64 - 1)
rooms = st.integers(0, 2**63 - 1)
text = st.text(max_size=50)


indices = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(
    lambda values: messages.indices_to_bytes(np.array(values, dtype=np.int64))
)
shares = st.integers(0, 64).flatmap(
    lambda of: st.builds(PageShare, st.integers(0, max(of - 1, 0)), st.just(of))
)


@st.composite
def targets(draw: st.DrawFn) -> Target:
    pages = draw(indices)
    return Target(
        tag=draw(st.integers(1, 2**64 - 1)),
        num_pages=len(pages) // 4,
        pages=pages,
        share=draw(shares),
        states=tuple(draw(st.lists(indices, max_size=3))),
        aux_slot=draw(st.none() | st.integers(0, 10_000)),
        completion_slot=draw(st.integers(0, 10_000)),
    )


requests = st.builds(
    RoomRequest,
    room=rooms,
    generation=rooms,
    decode_prefix_len=st.integers(0, 1_000_000),
    destinations=st.integers(1, 64),
    target=st.none() | targets(),
)
places = st.builds(Topology, *[st.integers(1, 8)] * 4).flatmap(
    lambda topology: st.builds(Place, st.just(topology), st.sampled_from(list(topology.coords())))
)
buffers = st.lists(
    st.tuples(st.integers(1, 2**63), st.integers(1, 1000), st.integers(1000, 10_000)), max_size=4
).map(lambda rows: Buffers(*map(tuple, zip(*rows, strict=True))) if rows else Buffers((), (), ()))


@st.composite
def components(draw: st.DrawFn) -> Component:
    layers = draw(st.lists(st.integers(0, 200), max_size=5, unique=True))
    cut = max(len(layers) - 2, 0)
    return Component(
        kind=draw(text),
        layers=tuple(layers[:cut]),
        buffers=Buffers((1 << 40,) * cut, (8,) * cut, (80,) * cut),
        cuts=(Units(draw(st.integers(1, 128)), draw(st.integers(1, 1 << 20))),),
        rows=draw(st.integers(1, 64)),
        numbered=draw(st.booleans()),
        elided=tuple(layers[cut:]),
        state=draw(st.none() | st.integers(0, 1)),
        segments=draw(st.booleans()),
    )


layouts = st.builds(
    Layout,
    page_size=st.integers(1, 1024),
    dtype=text,
    kv_layout=st.none() | text,
    components=st.lists(components(), max_size=3).map(tuple),
    aux=buffers,
    completions=buffers,
    states=st.tuples(text, text),
)
words = st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=4).map(
    lambda numbers: np.array(numbers, "<u8").tobytes()
)
lists = st.builds(
    lambda which, items, buffers: ListDigests(which, items[: len(items) // 2], items, buffers),
    st.integers(0, 5),
    words,
    words,
)
made = st.builds(
    RoomDigests,
    rooms,
    rooms,
    st.sampled_from([Verify.SAMPLE, Verify.ALL]),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
    st.lists(lists, max_size=3).map(tuple),
)
unmade = st.builds(RoomDigests, rooms, rooms, st.just(Verify.SAMPLE), failure=text)
any_message = st.one_of(
    requests,
    st.builds(Hello, rank=text, place=places, card=st.binary(max_size=50), layout=layouts),
    st.builds(HelloReply, refused=text),
    st.builds(HelloReply, st.none(), st.just("0a" * 16), st.integers(0, (1 << 64) - 1)),
    st.builds(RoomWait, room=rooms, generation=rooms),
    st.builds(RoomComputed, room=rooms, generation=rooms),
    st.builds(RoomAbort, room=rooms, generation=rooms, reason=text, refused=st.booleans()),
    made,
    unmade,
    st.builds(RoomDiffers, rooms, rooms, st.lists(lists, max_size=3).map(tuple)),
    st.builds(RoomFailed, room=rooms, generation=rooms, reason=text),
    st.builds(LinkReset, reason=text),
)


@pytest.mark.slow
@given(any_message)
def test_a_message_comes_back_as_it_went(message):
    assert messages.decode(messages.encode(message)) == message


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_pages_come_back_as_they_went(pages):
    packed = messages.indices_to_bytes(np.array(pages, dtype=np.int64))
    assert messages.indices_from_bytes(packed).tolist() == pages


@pytest.mark.parametrize("page", [-1, 2**31])
def test_a_page_that_is_no_index_is_refused(page):
    with pytest.raises(ValueError, match=str(page)):
        messages.indices_to_bytes(np.array([page]))


@pytest.mark.slow
@given(any_message, st.integers(0, 2**16 - 1).filter(lambda v: v != PROTOCOL_VERSION))
def test_another_version_is_told_by_its_header_alone(message, version):
    frame = messages.encode(message, version)[:6] + b"\xff whatever that version means"
    with pytest.raises(VersionMismatch, match=f"version {version} .* version {PROTOCOL_VERSION}"):
        messages.decode(frame)


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_a_sentence(garbage):
    with pytest.raises(MessageError):
        messages.decode(garbage)
    header = messages.encode(LinkReset(""))[:6]
    with pytest.raises(MessageError, match="malformed"):
        messages.decode(header + b"\xc1" + garbage)


def test_a_message_that_nests_without_end_is_refused():
    header = messages.encode(LinkReset(""))[:6]
    unknown_field = b"\x82\xa4type\xaalink_reset\xa1x" + b"\x91" * 200_000 + b"\xc0"
    with pytest.raises(MessageError, match="malformed"):
        messages.decode(header + unknown_field)


@pytest.mark.parametrize(
    "fields", [{"engine_id": ""}, {"engine_id": "g" * 32}, {"engine_epoch": -1}]
)
def test_a_data_path_that_stands_is_an_engines(fields):
    stands = HelloReply(None, "0a" * 16, 7)
    body = msgspec.to_builtins(stands) | fields
    frame = messages.encode(stands)[:6] + msgspec.msgpack.encode(body)
    with pytest.raises(MessageError, match="is none of te"):
        messages.decode(frame)


@pytest.mark.slow
@given(requests, st.data())
def test_a_request_that_contradicts_itself_is_refused(request, data):
    fields = [
        ("generation", -1),
        ("destinations", 0),
        ("decode_prefix_len", -1),
        ("decode_prefix_len", 10**15),
    ]
    inner = [
        ("num_pages", -1),
        ("tag", 0),
        ("aux_slot", -1),
        ("completion_slot", -1),
        ("states", [b"abc"]),
        ("share", {"index": 3, "of": 3}),
    ]
    body = msgspec.to_builtins(request, builtin_types=(bytes,))
    if request.target is not None and data.draw(st.booleans()):
        body["target"] |= [data.draw(st.sampled_from(inner))]
    else:
        body |= [data.draw(st.sampled_from(fields))]
    frame = messages.encode(request)[:6] + msgspec.msgpack.encode(body)
    with pytest.raises(MessageError):
        messages.decode(frame)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"verify": 0}, "digests of OFF by 7"),
        ({"seed": -1}, "digests of SAMPLE by -1"),
        ({"nbytes": -1}, "digests of -1 bytes"),
        ({"failure": "lost", "verify": 2}, "digests of ALL that could not be made"),
        ({"failure": "lost", "lists": [EMPTY]}, "digests of SAMPLE that could not be made"),
    ],
)
def test_digests_that_contradict_themselves_are_refused(fields, reason):
    digests = RoomDigests(1, 2, Verify.SAMPLE, 7)
    body = msgspec.to_builtins(digests, builtin_types=(bytes,)) | fields
    frame = messages.encode(digests)[:6] + msgspec.msgpack.encode(body)
    with pytest.raises(MessageError, match=reason):
        messages.decode(frame)


@pytest.mark.parametrize("kind", [RoomAbort, RoomFailed])
def test_a_reason_is_cut_by_who_says_it_and_by_who_hears_it(kind):
    assert len(kind(1, 2, "x" * 2_000_000).reason) == messages.REASON_CHARS_MAX
    body = {"type": kind.__struct_config__.tag, "room": 1, "generation": 2, "reason": "x" * 5_000}
    frame = messages.encode(kind(1, 2, ""))[:6] + msgspec.msgpack.encode(body)
    heard = messages.decode(frame)
    assert isinstance(heard, kind)
    assert len(heard.reason) == messages.REASON_CHARS_MAX


def test_a_place_outside_its_topology_is_refused():
    hello = Hello("", ALONE, b"", LAYOUT)
    body = msgspec.to_builtins(hello, builtin_types=(bytes,))
    body["place"]["coords"]["tp"] = 1
    frame = messages.encode(hello)[:6] + msgspec.msgpack.encode(body)
    with pytest.raises(MessageError, match="tp rank 1 does not exist"):
        messages.decode(frame)


def test_a_message_of_unbounded_length_is_refused_unread(monkeypatch):
    monkeypatch.setattr(messages, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(MessageError, match="10 are allowed"):
        messages.decode(messages.encode(LinkReset("a sentence")))


@pytest.mark.parametrize(
    "message", [RoomAbort(1, 1, "gone"), HelloReply("gone"), LinkReset("gone")]
)
def test_text_that_is_not_utf_8_is_refused_as_a_message(message):
    with pytest.raises(MessageError, match="malformed hand-over message: 'utf-8' codec"):
        messages.decode(messages.encode(message).replace(b"gone", b"g\xffne"))


def test_what_a_malformed_message_says_is_not_repeated_at_length():
    frame = messages.encode(LinkReset(""))[:6] + msgspec.msgpack.encode({"type": "x" * (1 << 20)})
    with pytest.raises(MessageError) as said:
        messages.decode(frame)
    assert len(str(said.value)) < 2 * messages.REASON_CHARS_MAX


def test_sentences_of_peers_are_cut():
    long = "x" * (1 << 20)
    assert (
        len(messages.decode(messages.encode(LinkReset(long))).reason) == messages.REASON_CHARS_MAX
    )
    assert (
        len(messages.decode(messages.encode(HelloReply(long))).refused) == messages.REASON_CHARS_MAX
    )
    hello = Hello(long, ALONE, b"", LAYOUT)
    assert len(messages.decode(messages.encode(hello)).rank) == messages.RANK_CHARS_MAX
