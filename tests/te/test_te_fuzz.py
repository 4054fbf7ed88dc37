# SPDX-License-Identifier: Apache-2.0
"""Frames with something wrong in them, seeded, to destinations and to sources: whatever comes, only
registered memory changes, the reason has a name, and everybody else goes on.
TE_FUZZ_INPUTS=1000000 makes a long run of it."""

from __future__ import annotations

import contextlib
import random
import socket
import struct

import numpy as np
import pytest
from te_far import wait_until
from te_frames import HEADER
from te_nonsense import U64_EDGES, Nonsense
from te_raw import RawListener, RawSource, with_keys
from te_ring import RingEnd
from te_steady import INPUTS, Reasons, Steady
from te_wire import PATHS, TRANSPORTS, Path
from wire_spec.table import RULES, Over

import te

pytestmark = pytest.mark.each_run

GUARD, OPEN, PART = 1 << 16, 1 << 16, 1 << 12
TAG = 5
KEY = b"k" * 32
TIMEOUT_S = 60.0


class Arena:
    """Between two guards, in one allocation: memory that is open to all, some that is open under a
    tag and in its ranges, and then, side by side, some that nobody may write: outside the ranges,
    by its rights, and as it is not registered."""

    def __init__(self, engine: te.Engine) -> None:
        self.memory = np.full(2 * GUARD + OPEN + 4 * PART, 0xEE, np.uint8)
        self.start = int(self.memory.ctypes.data) + GUARD
        engine.register(self.start, OPEN, remote="read-write")
        tagged = self.start + OPEN
        engine.register(tagged, 2 * PART, remote="tagged")
        engine.register(tagged + 2 * PART, PART, remote="read")
        engine.register(tagged + 3 * PART, PART, remote="none")
        engine.expect(TAG, ranges=[(self.start, OPEN), (tagged, PART)])
        engine.expect(9, peer="cd" * 16)  # for nobody who sends anything

    def guards_hold(self, nbytes: int = OPEN + PART) -> bool:
        """Whether only so many bytes have changed."""
        ends = self.memory[:GUARD], self.memory[GUARD + nbytes :]
        return all(bool((one == 0xEE).all()) for one in ends)


def address(rng: random.Random, arena: Arena) -> int:
    """Mostly inside, sometimes over an edge, sometimes anywhere."""
    kind = rng.random()
    if kind < 0.7:
        return arena.start + rng.randrange(OPEN)
    if kind < 0.9:
        return arena.start + rng.choice(
            [-1, -GUARD, OPEN - 1, *range(OPEN, OPEN + 5 * PART, PART // 2), OPEN + GUARD - 64]
        )
    return rng.choice(U64_EDGES)


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


def spew(rng: random.Random, sock: socket.socket | RingEnd, frames: Nonsense, inputs: int) -> int:
    """Sends frames until the engine has closed the connection or enough were sent."""
    number, sent = 0, 0
    # Those with less of it come further.
    damage, frames.at_edges = rng.choice([0.0, 0.1, 1.0]), rng.choice([0.0, 0.6, 0.6])
    with contextlib.suppress(ConnectionError, BlockingIOError):
        while sent < inputs:
            number += 1 if rng.random() > damage else rng.choice([1, 1, 1, 0, 2])
            sent += 1
            data = frames.frame(number)
            if rng.random() < damage:
                data = broken(rng, data)
            if rng.random() < damage / 10:
                data *= 2
            sock.sendall(data)
            if rng.random() < 0.3:
                sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    if not sock.recv(1 << 16):
                        break
                sock.setblocking(True)
    return sent


class Friend:
    """A peer that keeps to the rules, and is served all the time."""

    def __init__(self, engine: te.Engine, friend: te.Engine) -> None:
        self._own, self._kept = np.full(64, 7, np.uint8), np.zeros(64, np.uint8)
        friend.register(self._own)
        engine.register(self._kept, remote="read-write")
        self.peer = friend.connect(engine.card())
        self._blocks = te.Blocks.of(self._own.ctypes.data, self._kept.ctypes.data, 64)

    def is_served(self) -> bool:
        self._kept[:] = 0
        done = self.peer.write(self._blocks).wait(TIMEOUT_S) is te.Status.DONE
        return done and bool((self._kept == 7).all())


def ask_for(peer: te.Peer, arena: Arena) -> list[te.Transfer]:
    """Something for a destination to answer."""
    found = []
    for i in range(3):
        found.append(peer.write(te.Blocks.of(arena.start, arena.start + i, 100), TAG))
        found.append(peer.read(te.Blocks.of(arena.start, arena.start + 100 * i, 100)))
    return found


@pytest.mark.slow
@pytest.mark.timeout(0 if INPUTS > 10_000 else 300)
@pytest.mark.parametrize("path", [one for one in PATHS if one.over is not Over.RDMA], ids=str)
def test_hostile_frames(path: Path) -> None:
    rng, inputs = random.Random(20), INPUTS // 2
    steady, transport = Steady(inputs, str(path)), TRANSPORTS[path.over]
    config = te.Config(keys=(KEY,), connect_timeout_s=TIMEOUT_S)
    with (
        te.Engine(config) as engine, te.Engine(config) as friend_engine, Reasons() as reasons,
        RawListener(transport) as listener, with_keys(KEY),
    ):  # fmt: skip
        arena, friend, card = Arena(engine), Friend(engine, friend_engine), engine.card()
        frames = Nonsense(rng, path, lambda: address(rng, arena))
        # Of a destination, answers to `ask_for` alone land.
        room = OPEN + PART if path.from_source else 300
        sent = 0
        while sent < inputs:
            transfers: list[te.Transfer] = []
            if path.from_source:
                sock = RawSource(card, transport).sock
            else:
                peer, sock = listener.connect(engine)
                transfers = ask_for(peer, arena)
            linger = struct.pack("ii", rng.randint(0, 1), 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            with sock:
                sent += spew(rng, sock, frames, rng.randint(1, 20))
            for transfer in transfers:
                with contextlib.suppress(te.TransferFailed):
                    assert transfer.wait(TIMEOUT_S)
            assert arena.guards_hold(room)
            assert friend.is_served()
            steady.look(sent)
        wait_until(lambda: engine.stats().rails == friend.peer.rails, "only the friend is left")
        assert arena.guards_hold(room)
        steady.check()
        assert frames.rounds, "not every bound was tried"
        assert reasons.violations.total() > inputs // 50
        assert not reasons.others
        assert len(reasons.violations) > 5


def test_a_kind_that_is_added_to_the_table_is_fuzzed(monkeypatch: pytest.MonkeyPatch) -> None:
    new = RULES[0]._replace(kind=99, item=None, has_payload=False)
    monkeypatch.setattr("te_wire.RULES", (*RULES, new))
    frames = Nonsense(random.Random(1), PATHS[0], lambda: 0)
    assert new.source & PATHS[0].over
    kinds = set()
    while not frames.rounds:
        kinds.add(frames.frame(1)[0])
    assert {one.kind for one in [*RULES, new]} <= kinds


def test_random_bytes_instead_of_frames() -> None:
    rng = random.Random(3)
    with te.Engine() as engine:
        arena = Arena(engine)
        for _ in range(50):
            source = RawSource(engine.card())
            with source.sock, contextlib.suppress(ConnectionError):
                source.sock.sendall(rng.randbytes(HEADER.size * 4))
        wait_until(lambda: engine.stats().rails == 0, "all are gone")
        assert arena.guards_hold()
