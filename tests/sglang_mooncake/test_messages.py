# SPDX-License-Identifier: Apache-2.0
"""The wire between ranks: everything comes back as it went in, and nothing else is taken."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake import messages
from sglang_mooncake.layout import Buffers, Layout
from sglang_mooncake.messages import (
    PROTOCOL_VERSION,
    Hello,
    HelloReply,
    LinkReset,
    MessageError,
    RoomAbort,
    RoomFailed,
    RoomRequest,
    VersionMismatch,
)

u64 = st.integers(0, 2**64 - 1)
rooms = st.integers(0, 2**63 - 1)
text = st.text(max_size=50)


@st.composite
def requests(draw: st.DrawFn) -> RoomRequest:
    pages = draw(st.lists(st.integers(0, 2**31 - 1), max_size=20))
    return RoomRequest(
        room=draw(rooms),
        generation=draw(rooms),
        tag=draw(st.integers(1, 2**64 - 1)),
        num_pages=len(pages),
        pages=messages.pages_to_bytes(np.array(pages, dtype=np.int64)),
        aux_slot=draw(st.integers(0, 10_000)),
        seal_slot=draw(st.integers(0, 10_000)),
        decode_prefix_len=draw(st.integers(0, 1_000_000)),
        destinations=draw(st.integers(1, 64)),
    )


buffers = st.lists(
    st.tuples(st.integers(1, 2**63), st.integers(1, 1000), st.integers(1000, 10_000)), max_size=4
).map(lambda rows: Buffers(*map(tuple, zip(*rows, strict=True))) if rows else Buffers((), (), ()))
layouts = st.builds(
    Layout,
    page_size=st.integers(1, 1024),
    dtype=text,
    kv_layout=st.none() | text,
    is_mla=st.booleans(),
    layer_ids=st.lists(st.integers(0, 200), max_size=5).map(tuple),
    kv=buffers,
    aux=buffers,
    seals=buffers,
)
any_message = st.one_of(
    requests(),
    st.builds(Hello, rank=text, card=st.binary(max_size=50), layout=layouts),
    st.builds(HelloReply, refused=st.none() | text),
    st.builds(RoomAbort, room=rooms, generation=rooms, reason=text),
    st.builds(RoomFailed, room=rooms, generation=rooms, reason=text),
    st.builds(LinkReset, reason=text),
)


@given(any_message)
def test_a_message_comes_back_as_it_went(message):
    assert messages.decode(messages.encode(message)) == message


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_pages_come_back_as_they_went(pages):
    packed = messages.pages_to_bytes(np.array(pages, dtype=np.int64))
    assert messages.pages_from_bytes(packed).tolist() == pages


@pytest.mark.parametrize("page", [-1, 2**31])
def test_a_page_that_is_no_index_is_refused(page):
    with pytest.raises(ValueError, match=str(page)):
        messages.pages_to_bytes(np.array([page]))


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


@given(requests(), st.data())
def test_a_request_that_contradicts_itself_is_refused(request, data):
    field, value = data.draw(
        st.sampled_from(
            [
                ("num_pages", request.num_pages + 1),
                ("tag", 0),
                ("generation", -1),
                ("aux_slot", -1),
                ("seal_slot", -1),
                ("destinations", 0),
                ("decode_prefix_len", -1),
            ]
        )
    )
    body = msgspec.to_builtins(request, builtin_types=(bytes,)) | {field: value}
    frame = messages.encode(request)[:6] + msgspec.msgpack.encode(body)
    with pytest.raises(MessageError):
        messages.decode(frame)


def test_a_message_of_unbounded_length_is_refused_unread(monkeypatch):
    monkeypatch.setattr(messages, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(MessageError, match="10 are allowed"):
        messages.decode(messages.encode(LinkReset("a sentence")))
