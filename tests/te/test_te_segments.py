# SPDX-License-Identifier: Apache-2.0
"""Cutting transfers, and moving bytes between scattered memory over a socket."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import BLOCK, Blocks
from te.transports.tcp.segments import Segments
from te.transports.tcp.syscalls import IOVEC, Iovecs, receive_into, send_from

ROWS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 50)), max_size=30
)


@given(ROWS, st.integers(1, 6), st.integers(1, 80))
def test_segments_are_bounded_and_complete(
    rows: list[tuple[int, int, int]], max_blocks: int, max_nbytes: int
) -> None:
    blocks = Blocks(np.array(rows, BLOCK))
    segments = Segments(blocks, max_blocks, max_nbytes)
    taken = []
    while not segments.exhausted:
        part = segments.take()
        assert 1 <= len(part) <= max_blocks
        assert int(part["nbytes"].sum()) <= max_nbytes
        taken.append(Blocks(part))
    assert Blocks.concat(taken).merged().array.tolist() == blocks.merged().array.tolist()


def ranges_in(buffer: np.ndarray, sizes: list[int], order: list[int]) -> np.ndarray:
    """Ranges of the sizes with a guard byte between them, listed in the order."""
    starts = np.cumsum([1] + [size + 1 for size in sizes])[:-1]
    rows = [(buffer.ctypes.data + int(starts[i]), sizes[i]) for i in order]
    return np.array(rows, IOVEC)


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_partial_sends_and_receives_keep_their_place(sizes: list[int], random: object) -> None:
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    total = sum(sizes) + len(sizes) + 1
    source = np.random.default_rng(1).integers(1, 256, total, dtype=np.uint8)
    target = np.zeros(total, np.uint8)
    ours, theirs = Iovecs(), Iovecs()
    ours.load(ranges_in(source, sizes, order))
    theirs.load(ranges_in(target, sizes, order))
    one, two = socket.socketpair()
    with one, two:
        # Small buffers make every call a partial one.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while theirs.remaining:
            if ours.remaining:
                with contextlib.suppress(BlockingIOError):
                    assert ours.send(one.fileno()) > 0
            assert theirs.receive(two.fileno()) > 0
    guards = np.cumsum([0] + [size + 1 for size in sizes])
    assert (target[guards] == 0).all()
    source[guards] = 0
    assert (source == target).all()


def test_rest_and_unload() -> None:
    buffer = np.zeros(20, np.uint8)
    iovecs = Iovecs()
    iovecs.load(np.array([(buffer.ctypes.data, 5), (buffer.ctypes.data + 10, 5)], IOVEC))
    one, two = socket.socketpair()
    with one, two:
        one.send(b"1234567")
        assert iovecs.receive(two.fileno()) == 7
    assert iovecs.rest().tolist() == [(buffer.ctypes.data + 12, 3)]
    iovecs.unload()
    assert iovecs.remaining == 0
    assert buffer.tobytes() == b"12345" + bytes(5) + b"67" + bytes(8)


def test_small_calls_report_errno() -> None:
    one, two = socket.socketpair()
    with one, two:
        room = bytearray(8)
        with pytest.raises(BlockingIOError):
            receive_into(two.fileno(), memoryview(room))
        assert send_from(one.fileno(), bytearray(b"abc")) == 3
        assert receive_into(two.fileno(), memoryview(room)) == 3
        two.close()
        with pytest.raises(BrokenPipeError):
            send_from(one.fileno(), bytearray(b"abc"))
