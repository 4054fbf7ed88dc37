# SPDX-License-Identifier: Apache-2.0
"""Staging with bytes: gathered from sealed memory, sent over a channel that is no network, and
scattered to sealed memory, by several channels at once."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from te_far import wait_until
from te_sealed import Sealed, SealedMemory, sealed
from te_staging import COPIED, COPYING, HELD, Lane, Range, Slot, Staging

SLOT_BYTES = 4096
LINK, RIGHT = 0x10, 0x30


def cut(ranges: list[Range], most: int) -> tuple[list[Range], list[Range]]:
    """The first bytes of them, up to ``most``, and the rest."""
    taken: list[Range] = []
    rest = list(ranges)
    while rest and most:
        kind, at, nbytes = rest.pop(0)
        taken.append((kind, at, min(nbytes, most)))
        if nbytes > most:
            rest.insert(0, (kind, at + most, nbytes - most))
        most -= taken[-1][2]
    return taken, rest


@dataclass
class Channel:
    """A byte channel that takes and gives as many bytes as it likes."""

    generator: random.Random
    room: int
    under_way: bytearray = field(default_factory=bytearray)

    def send(self, data: np.ndarray[Any, Any]) -> int:
        n = min(self.generator.randint(0, self.room), self.room - len(self.under_way), len(data))
        self.under_way += data[:n].tobytes()
        return n

    def receive(self, into: np.ndarray[Any, Any]) -> int:
        n = min(self.generator.randint(0, self.room), len(self.under_way), len(into))
        into[:n] = np.frombuffer(bytes(self.under_way[:n]), np.uint8)
        del self.under_way[:n]
        return n


class Source:
    """Sends what is in ranges, as a rail would."""

    def __init__(self, ring: Staging, owner: int, channel: Channel, ranges: list[Range]) -> None:
        self.lane = Lane(ring, owner)
        self.problem = 0
        self._ring, self._channel, self._left = ring, channel, ranges
        self._sent = 0

    def turn(self) -> bool:
        """Whether all is sent, or it has failed."""
        if self._left and (slot := self.lane.take()) is not None:
            spans, self._left = cut(self._left, self._ring.slot_bytes)
            slot.gather(spans, LINK, RIGHT)
        if self.lane.slots and (slot := self.lane.slots[0]).state == COPIED:
            self.problem = self.problem or slot.fault
            self._sent += self._channel.send(slot.view[self._sent : slot.nbytes])
            if self._sent == slot.nbytes or self.problem:
                self.lane.give()
                self._sent = 0
        if self.problem:
            self.lane.drop()
            return True
        return not self._left and not self.lane.slots


class Destination:
    """Receives into ranges, and checks bytes when they count as landed."""

    def __init__(
        self, ring: Staging, owner: int, channel: Channel, ranges: list[Range], check: Any
    ) -> None:
        self.lane = Lane(ring, owner)
        self.problem = 0
        self._ring, self._channel, self._left, self._check = ring, channel, ranges, check
        self._have = 0
        self._landing: list[list[Range]] = []

    def turn(self) -> bool:
        """Whether all has landed, or it has failed."""
        slot = self._filling()
        if slot is not None:
            want = min(self._ring.slot_bytes, sum(one[2] for one in self._left))
            n = self._channel.receive(slot.view[self._have : want])
            self._have += n
            # A slot that others wait for is not kept for bytes that do not come.
            idle = n == 0 and self._ring.is_scarce
            if self._have == 0 and idle and slot is self.lane.slots[0]:
                self.lane.give()
            elif self._have == want or (self._have and idle):
                spans, self._left = cut(self._left, self._have)
                self._landing.append(spans)
                slot.scatter(spans, LINK, RIGHT)
        if self.lane.slots and (slot := self.lane.slots[0]).state == COPIED:
            self.problem = self.problem or slot.fault
            if slot.fault == 0:
                self._check(self._landing.pop(0))
            self.lane.give()
        if self.problem:
            self.lane.drop()
            return True
        return not self._left and not self.lane.slots

    def _filling(self) -> Slot | None:
        if self.lane.slots and self.lane.slots[-1].state == HELD:
            return self.lane.slots[-1]
        self._have = 0
        return self.lane.take() if self._left else None


def ranges_of(
    generator: random.Random, memory: SealedMemory, part: range, kind: int
) -> tuple[list[Range], list[int]]:
    """Pieces of a part of the memory in any order; and their offsets, byte by byte."""
    edges = sorted({part.start, part.stop, *generator.sample(part, min(len(part), 30))})
    pieces = list(itertools.pairwise(edges))
    generator.shuffle(pieces)
    ranges = [(kind, memory.address + low, high - low) for low, high in pieces]
    return ranges, [i for low, high in pieces for i in range(low, high)]


class World:
    """Two rings, and channels between them, each with a part of both sides' memory."""

    def __init__(self, kind: Sealed, seed: int, lanes: int, slots: int, nbytes: int) -> None:
        generator = random.Random(seed)
        self.kind = kind
        self.src, self.dst = kind.allocate(nbytes), kind.allocate(nbytes)
        self.src.view[:] = np.frombuffer(generator.randbytes(self.src.nbytes), np.uint8)
        self.expected = np.zeros(self.dst.nbytes, np.uint8)
        self.rings = [Staging(slots, SLOT_BYTES), Staging(slots, SLOT_BYTES)]
        self._unpin = [kind.pin(one.base, one.memory.nbytes) for one in self.rings]
        self.sources: list[Source] = []
        self.destinations: list[Destination] = []
        for i in range(lanes):
            part = range(i * nbytes // lanes, (i + 1) * nbytes // lanes)
            channel = Channel(generator, generator.choice([5, 700, 10_000]))
            near, order = ranges_of(generator, self.src, part, kind.struct)
            far, places = ranges_of(generator, self.dst, part, kind.struct)
            self.expected[places] = self.src.view[order]
            self.sources.append(Source(self.rings[0], i + 1, channel, near))
            self.destinations.append(
                Destination(self.rings[1], i + 1, channel, far, self._check_landed)
            )

    def _check_landed(self, spans: list[Range]) -> None:
        for _, at, nbytes in spans:
            low = at - self.dst.address
            assert (self.dst.view[low : low + nbytes] == self.expected[low : low + nbytes]).all()

    def run(self) -> None:
        """One thread, as a worker; until every channel is done."""
        todo: list[Source | Destination] = [*self.sources, *self.destinations]
        while todo:
            for ring in self.rings:
                ring.poll()
            todo = [one for one in todo if not one.turn()]
            self.let_copy()

    def let_copy(self) -> None:
        """Gives the processor to who copies, if anything is being copied. A narrow channel has a
        turn for each few bytes, and beside a busy process a call costs that process's slice of
        time: 53,077 bytes took more than two minutes."""
        lanes = [one.lane for one in (*self.sources, *self.destinations)]
        if any(slot.state == COPYING for lane in lanes for slot in lane.slots):
            os.sched_yield()

    def close(self) -> None:
        for ring, unpin in zip(self.rings, self._unpin, strict=True):
            while not ring.close():
                os.sched_yield()
            unpin()


@pytest.mark.slow
@pytest.mark.by_turns("bytes")
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 30),
    lanes=st.integers(1, 5),
    slots=st.integers(1, 8),
    nbytes=st.integers(100, 60_000),
)
def test_bytes_arrive(seed: int, lanes: int, slots: int, nbytes: int) -> None:
    """More channels than slots, too: each has its turn."""
    with sealed(seed, delay_us=50) as kind:
        world = World(kind, seed, lanes, slots, nbytes)
        world.run()
        assert [one.problem for one in (*world.sources, *world.destinations)] == [0] * (2 * lanes)
        assert (world.dst.view == world.expected).all()
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize("how", ["refuse", "fail"])
def test_a_copy_that_fails_ends_its_channel_alone(how: str, batches: int) -> None:
    with sealed(5, delay_us=50) as kind:
        world = World(kind, 5, 3, 3, 60_000)
        getattr(kind, how)(batches)
        problem = errno.ENOSPC if how == "refuse" else errno.EIO
        todo: list[Source | Destination] = [*world.sources, *world.destinations]
        while todo:
            for ring in world.rings:
                ring.poll()
            todo = [one for one in todo if not one.turn()]
            for one, other in zip(world.sources, world.destinations, strict=True):
                if one.problem or other.problem:  # What the two would tell each other.
                    one.lane.drop()
                    other.lane.drop()
                    todo = [left for left in todo if left not in (one, other)]
            world.let_copy()
        problems = [
            one.problem or two.problem
            for one, two in zip(world.sources, world.destinations, strict=True)
        ]
        assert sorted(problems) == [0, 0, problem]
        world.close()


@pytest.mark.slow
def test_who_fences_ends_copies_while_a_worker_uses_the_ring() -> None:
    with sealed(9, delay_us=50) as kind:
        world = World(kind, 9, 3, 2, 100_000)
        over = threading.Event()
        asked = 0

        def fence() -> None:
            nonlocal asked
            while not over.is_set():
                for ring in world.rings:
                    mark = ring.mark()
                    while not ring.ended(mark, LINK, RIGHT):
                        os.sched_yield()
                    asked += 1

        threads = [threading.Thread(target=fence) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: asked > 0, "they fence")
        world.run()
        over.set()
        for thread in threads:
            thread.join()
        assert (world.dst.view == world.expected).all()
        world.close()
