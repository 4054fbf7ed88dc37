# SPDX-License-Identifier: Apache-2.0
"""Links over RDMA, on devices that move nothing, with seeded nonsense on the connection and on the
queue pairs, against a destination and against a source: late, repeated, out of order, for what
never was. Only the link that says it ends. TE_FUZZ_INPUTS=1000000 makes a long run of it."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
from te_direct import (
    Frame,
    NullEngine,
    RawDirectDestination,
    RawDirectListener,
    RawDirectSource,
    ask,
    table,
    word,
)
from te_far import wait_until
from te_frames import FAR, AckStatus, Kind, abandon, ack, end, header
from te_nonsense import U64_EDGES, Nonsense
from te_raw import with_keys
from te_steady import INPUTS, Reasons, Steady
from te_wire import Path
from test_te_fuzz import broken
from wire_spec.table import Over

import te
from te_bench._null import QueuePair, Wires

pytestmark = pytest.mark.each_run

TAGS = (0, 5, 6, 9)
OPEN_TAGS = (5, 6)
#: Open, but not for whom these frames come from.
OTHERS_TAG = 9
MEMORY, PAGE = 1 << 16, 4096
TIMEOUT_S = 60.0
KEY = b"k" * 32


def wild(rng: random.Random) -> int:
    return rng.choice([*U64_EDGES, rng.randrange(300), rng.randrange(1 << 20)])


class Source:
    """A source that knows the rules, and keeps to most of them."""

    def __init__(
        self, rng: random.Random, raw: RawDirectSource, frames: Nonsense, hidden: int
    ) -> None:
        self.rng, self.raw, self.frames = rng, raw, frames
        #: Where memory is that no peer may be told of.
        self.hidden = hidden
        self.damage = rng.choice([0.0, 0.02, 0.3])
        #: One that keeps to all rules comes further.
        self.lies = self.damage > 0 or rng.random() < 0.3
        #: How much of it is out of the table of the wire format.
        self.nonsense = rng.choice([0.04, 0.5, 0.5]) if self.lies else 0.0
        self.number = 0
        #: Pieces of what was asked for, and the marks of what was granted.
        self.asked: dict[int, int] = {}
        self.tags: dict[int, int] = {}
        self.marks: dict[int, int] = {}
        self.rails: dict[int, tuple[int, QueuePair]] = {}

    def step(self) -> bool:
        """One input; False once the engine has ended the link."""
        rng = self.rng
        kind = rng.random()
        if kind < 0.04:
            self._rail(rng.choice([0, 0, 1, 7]))
        elif kind < 0.3 and self.rails:
            _, pair = rng.choice(list(self.rails.values()))
            pair.send_marks(self._mark() for _ in range(rng.choice([1, 1, 3, 70])))
        elif kind < 0.32 and self.rails:
            rng.choice(list(self.rails.values()))[1].to_error()
        else:
            data = self._frame()
            self.raw.send(broken(rng, data) if rng.random() < self.damage else data)
        if rng.random() < 0.4:
            frames = self.raw.drain()
            if frames is None:
                return False
            for frame in frames:
                self._on_frame(frame)
        return True

    def _rail(self, index: int) -> None:
        epoch = self.rails[index][0] + 1 if index in self.rails else 1
        pair = self.raw.rail(index, epoch)
        if pair is not None:
            pair.receive(8)
            self.rails[index] = epoch, pair

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is Kind.TABLE:
            assert self.hidden not in np.frombuffer(frame.body, FAR)["start"]
        elif frame.kind is Kind.ACK and frame.status == AckStatus.GRANTED:
            # A read is granted whatever its tag is: it has a mark of 0.
            assert self.lies or not frame.tag or self.tags[frame.transfer] != OTHERS_TAG
            self.marks[frame.transfer] = frame.tag
        elif frame.kind is Kind.ACK:
            self.marks.pop(frame.transfer, None)

    def _mark(self) -> int:
        rng = self.rng
        if self.marks and rng.random() < 0.9:
            number = rng.choice(list(self.marks))
            return self.marks[number] + rng.randrange(self.asked.get(number, 1) or 1)
        return rng.choice([0, rng.randrange(1 << 32)])

    def _known(self) -> int:
        lies = [self.number, wild(self.rng)] if self.lies or not self.asked else []
        return self.rng.choice([*list(self.asked)[-8:], *lies])

    def _frame(self) -> bytes:
        rng = self.rng
        if rng.random() < self.nonsense:
            return self.frames.frame(self._known())
        kind = rng.random()
        tag = rng.choice(TAGS)
        if kind < 0.5:
            number = self._known() if self.lies and rng.random() < 0.03 else self.number + 1
            self.number = max(self.number, min(number, self.number + 100))
            pieces = rng.choice([0, 1, 1, 2, 5, 64, 65, 70])
            self.asked.pop(number, None)
            self.asked[number] = pieces
            if len(self.asked) > 64:
                oldest = next(iter(self.asked))
                del self.asked[oldest], self.tags[oldest]
            total = 3 if self.lies and rng.random() < 0.02 else 1 << 20
            self.tags[number] = tag
            return ask(number, pieces, total=total, tag=tag)
        if kind < 0.6:
            self.number += 1
            return end(self.number, tag)
        if kind < 0.75:
            number = self._known()
            sent = (
                rng.choice([0, 1, 2, 5, 1 << 40])
                if self.lies
                else rng.randrange(self.asked.get(number, 0) + 1)
            )
            return abandon(number, self.tags.get(number, tag), sent)
        index = rng.choice([*self.rails, 0])
        epoch = self.rails[index][0] if index in self.rails else 1
        if not self.lies:
            self.rails.pop(index, None)
        items = [
            (number, rng.randrange(max(self.asked.get(number, 1), 1)))
            for number in (self._known() for _ in range(rng.choice([0, 0, 1, 3])))
            if number < 1 << 60
        ]
        return word(Kind.RAIL_LOST, index, epoch - (self.lies and rng.random() < 0.3), items)


@pytest.mark.timeout(0 if INPUTS > 10_000 else 300)
def test_a_hostile_source() -> None:
    rng, wires, steady = random.Random(4), Wires(), Steady(INPUTS, "direct, source")
    with (
        NullEngine(wires, nics=1, max_connections=64, keys=(KEY,)) as engine, with_keys(KEY),
        NullEngine(wires, nics=1, keys=(KEY,)) as friend_engine, Reasons() as reasons,
    ):  # fmt: skip
        memory = np.zeros(MEMORY, np.uint8)
        region, near = engine.register(memory, remote="read-write"), friend_engine.register(memory)
        hidden = engine.register(np.zeros(PAGE, np.uint8), remote="none")
        for remote in ("read", "tagged"):
            engine.register(np.zeros(PAGE, np.uint8), remote=remote)
        friend = friend_engine.connect(engine.card())
        friendly = te.Blocks.of(near.address, region.address, MEMORY)
        for tag in OPEN_TAGS:
            engine.expect(tag)
        engine.expect(OTHERS_TAG, peer="cd" * 16)
        frames = Nonsense(rng, Path(Over.RDMA, True), lambda: wild(rng))
        done = 0
        while done < INPUTS:
            with contextlib.closing(RawDirectSource(engine.card(), wires)) as raw:
                source = Source(rng, raw, frames, hidden.address)
                with contextlib.suppress(ConnectionError):
                    for _ in range(rng.randint(1, 80)):
                        done += 1
                        if not source.step():
                            break
                        if rng.random() < 0.01:
                            tag = rng.choice(OPEN_TAGS)
                            engine.fence(tag, TIMEOUT_S)
                            engine.expect(tag)
            assert friend.write(friendly).wait(TIMEOUT_S) is te.Status.DONE
            steady.look(done)
        wait_until(lambda: engine.stats().rails == 1, "only the friend is left")
        steady.check()
        assert frames.rounds, "not every bound was tried"
        assert reasons.violations.total() > INPUTS // 200
        assert len(reasons.violations) > 5


class Destination:
    """A destination that knows the rules, and keeps to most of them."""

    def __init__(
        self, rng: random.Random, raw: RawDirectDestination, memory: int, frames: Nonsense
    ) -> None:
        self.rng, self.raw, self.memory, self.frames = rng, raw, memory, frames
        self.damage = rng.choice([0.0, 0.02, 0.3])
        #: One that keeps to all rules comes further.
        self.lies = self.damage > 0 or rng.random() < 0.3
        #: How much of it is out of the table of the wire format.
        self.nonsense = rng.choice([0.04, 0.5, 0.5]) if self.lies else 0.0
        #: Pieces of what was asked for.
        self.asked: dict[int, int] = {}
        self.fresh: list[int] = []
        self.lost: list[Frame] = []
        self.slot = 0

    def step(self) -> bool:
        """One input; False once the engine has ended the link."""
        rng = self.rng
        rails = list(self.raw.rails.values())
        for pair in rails:
            pair.receive(len(pair.poll()))
        kind = rng.random()
        if kind < 0.03 and rails:
            rng.choice(rails).to_error()
        else:
            data = self._frame()
            self.raw.send(broken(rng, data) if rng.random() < self.damage else data)
        frames = self.raw.drain()
        for frame in frames or ():
            if frame.kind is Kind.ASK:
                self.asked[frame.transfer] = 1
                self.fresh.append(frame.transfer)
            elif frame.kind is Kind.RAIL_LOST:
                self.lost.append(frame)
        return frames is not None

    def _known(self) -> int:
        lies = [wild(self.rng)] if self.lies or not self.asked else []
        return self.rng.choice([*self.asked, *self.asked, *lies])

    def _items(self) -> list[tuple[int, int]]:
        rng = self.rng
        return [
            (self._known(), rng.choice([0, 1, 2, wild(rng)])) for _ in range(rng.choice([0, 2]))
        ]

    def _frame(self) -> bytes:
        rng = self.rng
        if rng.random() < self.nonsense:
            return self.frames.frame(self._known())
        kind = rng.random()
        rail, epoch = rng.choice([*list(self.raw.rails), (0, 1), (7, 1)])
        if kind < 0.3 and (self.lies or self.fresh):
            self.slot = (self.slot + 1) % 256
            mark = self.slot << 24 | 1 << 16 if rng.random() < 0.9 else wild(rng)
            return header(
                Kind.ACK,
                status=AckStatus.GRANTED,
                transfer=self.fresh.pop(0) if self.fresh else self._known(),
                tag=mark,
            )
        if kind < 0.5 and (self.lies or rng.random() < 0.05):
            status = rng.choice([AckStatus.LANDED, AckStatus.LANDED, *AckStatus])
            return ack(self._known(), status, b"no" if status else b"")
        if kind < 0.7:
            half = self.memory + MEMORY // 2
            whole = [(self.memory, half), (half, self.memory + MEMORY)]
            some = [(start, start + rng.choice([1, 9, MEMORY])) for start in sorted(
                wild(rng) % (1 << 62) for _ in range(rng.choice([0, 1, 4]))
            )]  # fmt: skip
            return table(
                rng.choice([whole, whole, whole[:1], some]),
                not self.lies or rng.random() < 0.8,
                rights=rng.choice([7, 7, 7, 1, 2, 6, *([0, 8] if self.lies else [])]),
            )
        if kind < 0.8:
            if self.lost and rng.random() < 0.9:
                one = self.lost.pop(0)
                landed = [
                    (int(one.body[i]), 0) for i in range(0, len(one.body), 16) if rng.random() < 0.5
                ]
                return word(Kind.RAIL_CLOSED, one.transfer, one.tag, landed)
            return word(Kind.RAIL_CLOSED, rail, epoch, self._items())
        if kind < 0.88:
            any_rail = rng.random() < 0.3
            return word(
                Kind.RAIL_BROKEN, 255 if any_rail else rail, epoch, [],
                status=rng.randrange(256), total=rng.choice([0, 1, 2, wild(rng)]),
            )  # fmt: skip
        return word(Kind.CREDIT, rail, epoch, [], total=rng.choice([1, 64, 500, wild(rng)]))


@pytest.mark.slow
@pytest.mark.timeout(0 if INPUTS > 10_000 else 300)
def test_a_hostile_destination() -> None:
    rng, wires, steady = random.Random(5), Wires(), Steady(INPUTS, "direct, destination")
    with (
        NullEngine(
            wires, nics=2, rail_timeout_s=0.05, stall_timeout_s=5.0, keys=(KEY,)
        ) as engine,
        with_keys(KEY),
        NullEngine(wires, nics=2, keys=(KEY,)) as friend_engine,
        RawDirectListener(wires, nics=2) as listener, Reasons() as reasons,
    ):  # fmt: skip
        memory = np.zeros(MEMORY, np.uint8)
        landing = memory.copy()
        region, far = engine.register(memory), friend_engine.register(landing, remote="read-write")
        friend = engine.connect(friend_engine.card())
        friendly = te.Blocks.of(region.address, far.address, MEMORY)
        frames = Nonsense(rng, Path(Over.RDMA, False), lambda: wild(rng))
        done = 0
        # Until a rail has come down, too: how many do so in a few inputs is chance.
        while done < INPUTS or (not reasons.others and done < 20 * INPUTS):
            peer, raw = listener.connect(engine)
            destination = Destination(rng, raw, far.address, frames)
            transfers: list[te.Transfer] = []
            with contextlib.suppress(ConnectionError):
                for _ in range(rng.randint(1, 80)):
                    done += 1
                    submit(rng, peer, region.address, far.address, transfers)
                    if not destination.step():
                        break
            listener.forget(raw)
            for transfer in transfers:
                with contextlib.suppress(te.TransferFailed):
                    assert transfer.wait(TIMEOUT_S)
            wait_until(lambda: not peer.alive, "its link has ended")  # noqa: B023
            assert friend.write(friendly).wait(TIMEOUT_S) is te.Status.DONE
            steady.look(done)
        steady.check()
        assert frames.rounds, "not every bound was tried"
        assert reasons.others
        engine.deregister(region, TIMEOUT_S)


def submit(
    rng: random.Random, peer: te.Peer, near: int, far: int, transfers: list[te.Transfer]
) -> None:
    """Perhaps writes, reads, or cancels something."""
    kind = rng.random()
    if kind < 0.25 and len(transfers) < 200:
        count = rng.choice([1, 1, 300])
        src = near + np.arange(count, dtype=np.uint64) * np.uint64(100)
        blocks = te.Blocks.of(src, src - np.uint64(near) + np.uint64(far), 64)
        transfers.append(peer.write(blocks, rng.choice(TAGS)))
    elif kind < 0.3 and len(transfers) < 200:
        transfers.append(peer.read(te.Blocks.of(far, near, 4096)))
    elif kind < 0.35 and transfers:
        transfers[-1].cancel()
