# SPDX-License-Identifier: Apache-2.0
"""Frames with something wrong in them, seeded: whatever comes, only registered memory changes, the
reason has a name, and everybody else goes on. TE_FUZZ_INPUTS=1000000 makes a long run of it."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import numpy as np
import pytest
from te_far import wait_until
from te_frames import HEADER, AckStatus, Kind, abandon, ack, descriptors, end, segment, trailer
from te_raw import RawSource
from te_steady import INPUTS, Reasons, Steady

import te

GUARD, OPEN = 1 << 16, 1 << 16
U64_EDGES = [0, 1, 31, 1 << 12, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


class Arena:
    """Registered memory between two guards, in one allocation."""

    def __init__(self, engine: te.Engine) -> None:
        self.memory = np.full(2 * GUARD + OPEN, 0xEE, np.uint8)
        self.start = int(self.memory.ctypes.data) + GUARD
        engine.register(self.start, OPEN)

    def guards_hold(self) -> bool:
        return bool((self.memory[:GUARD] == 0xEE).all() and (self.memory[-GUARD:] == 0xEE).all())


def address(rng: random.Random, arena: Arena) -> int:
    """Mostly inside, sometimes over an edge, sometimes anywhere."""
    kind = rng.random()
    if kind < 0.7:
        return arena.start + rng.randrange(OPEN)
    if kind < 0.9:
        return arena.start + rng.choice([-1, -GUARD, OPEN - 1, OPEN, OPEN + GUARD - 64])
    return rng.choice(U64_EDGES)


def a_frame(rng: random.Random, arena: Arena, number: int) -> bytes:
    """A frame that is well-formed, but perhaps says what is not allowed."""
    kind = rng.choice([Kind.SEGMENT] * 5 + list(Kind))
    tag = rng.choice([0, 0, 0, 5, 9])
    if kind is Kind.SEGMENT:
        sizes = [rng.choice([1, 7, 64, 900, 4096]) for _ in range(rng.randint(1, 6))]
        landings = [(address(rng, arena), size) for size in sizes]
        total = sum(sizes) + rng.choice([0, 0, 0, 10, -1])
        payload = b"\x11" * sum(sizes)
        fault = rng.choice([0, 0, 0, 14])
        return segment(number, tag, landings, sum(sizes), max(total, 0)) + payload + trailer(fault)
    if kind is Kind.END:
        return end(number, tag)
    if kind is Kind.ABANDON:
        return abandon(number, tag, rng.choice([0, 0, 5, 1 << 40]))
    if kind is Kind.ACK:
        return ack(number, rng.choice([0, 1, 2, 3, 200]), b"x" * rng.choice([0, 3, 500]))
    blocks = [(address(rng, arena), address(rng, arena), rng.choice([1, 100, 70_000]))]
    return descriptors(kind, number, blocks)


def broken(rng: random.Random, data: bytes) -> bytes:
    """The frame cut, changed, repeated or replaced."""
    damage = rng.random()
    if damage < 0.5:
        return data
    if damage < 0.6:
        return data[: rng.randrange(len(data))]
    if damage < 0.85:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(min(len(changed), HEADER.size + 24))] = rng.randrange(256)
        return bytes(changed)
    if damage < 0.95:
        at = rng.choice([8, 16, 24, 32])
        changed = bytearray(data.ljust(HEADER.size, b"\0"))
        struct.pack_into("<Q", changed, at, rng.choice(U64_EDGES))
        return bytes(changed)
    return rng.randbytes(rng.randint(1, 200))


def spew(rng: random.Random, source: RawSource, arena: Arena, inputs: int) -> int:
    """Sends frames until the engine has closed the connection or enough were sent."""
    number, sent = 0, 0
    with contextlib.suppress(ConnectionError, BlockingIOError):
        while sent < inputs:
            number += rng.choice([1, 1, 1, 0, 2])
            sent += 1
            data = broken(rng, a_frame(rng, arena, number))
            if rng.random() < 0.1:
                data *= 2
            source.sock.sendall(data)
            if rng.random() < 0.3:
                source.sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not source.sock.recv(1 << 16):
                        break
                source.sock.setblocking(True)
    return sent


@pytest.mark.timeout(0 if INPUTS > 10_000 else 60)
@pytest.mark.parametrize("transport", ["samehost", "tcp"])
def test_hostile_frames(transport: str) -> None:
    rng = random.Random(20)
    steady = Steady(INPUTS, transport)
    with te.Engine() as engine, te.Engine() as friend_engine, Reasons() as reasons:
        arena = Arena(engine)
        card = engine.card()
        own = np.full(64, 7, np.uint8)
        kept = np.zeros(64, np.uint8)
        friend_engine.register(own)
        engine.register(kept)
        friend = friend_engine.connect(card)
        friendly = te.Blocks.of(own.ctypes.data, kept.ctypes.data, 64)
        engine.expect(5)
        sent = 0
        while sent < INPUTS:
            source = RawSource(card, transport)
            source.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", rng.randint(0, 1), 0)
            )
            with source.sock:
                sent += spew(rng, source, arena, rng.randint(1, 20))
            assert arena.guards_hold()
            kept[:] = 0
            assert friend.write(friendly).wait(10.0) is te.Status.DONE
            assert (kept == 7).all()
            steady.look(sent)
        wait_until(lambda: engine.stats().rails == friend.rails, "only the friend is left")
        assert arena.guards_hold()
        steady.check()
        assert reasons.violations.total() > INPUTS // 50
        assert not reasons.others
        assert len(reasons.violations) > 5


def test_answers_are_checked_as_hard() -> None:
    """The acknowledgements a destination could send are frames, too."""
    assert AckStatus.PROGRESS == 3
    rng = random.Random(3)
    with te.Engine() as engine:
        arena = Arena(engine)
        for _ in range(50):
            source = RawSource(engine.card())
            with source.sock, contextlib.suppress(ConnectionError):
                source.sock.sendall(rng.randbytes(HEADER.size * 4))
        wait_until(lambda: engine.stats().rails == 0, "all are gone")
        assert arena.guards_hold()
