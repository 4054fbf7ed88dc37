# SPDX-License-Identifier: Apache-2.0
"""The owner of a link over RDMA as a model: commands, answers and completions in any order, rails
that die at any step, and queue pairs that come late. The destination is by hand."""

from __future__ import annotations

import contextlib
import enum
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from te_contract import outcome
from te_direct import Frame, NullEngine, RawDirectListener, table, word
from te_far import wait_until
from te_frames import AckStatus, Kind, ack, header

import te
from te.core.wire import RECEIVE_DEPTH
from te.transports.rdma import link as link_module
from te.transports.rdma.link import RailedLink
from te.transports.rdma.rails import RailState
from te_bench._null import Device, QueuePair, Wires

TIMEOUT_S: Final = 60.0
NBYTES: Final = 1 << 12
FAR: Final = 1 << 20
MOST: Final = 5
LATE_MOST: Final = 3  # below link_module.ATTEMPTS_MAX
DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED
RAILS: Final = st.integers(0, 1)
ANY: Final = st.integers(0, MOST - 1)


class Place(enum.Enum):
    """Where the only piece of a transfer is."""

    ASKED = "it was not granted yet"
    WAITING = "for a rail"
    FLYING = "on a rail, and its completion is held back"
    LOST = "on a rail that died, and the destination has not said whether it landed"
    SENT = "it has landed"


@dataclass(eq=False)
class Asked:
    """A transfer that the destination knows of."""

    transfer: te.Transfer
    number: int
    is_read: bool
    mark: int
    place: Place = Place.ASKED
    lost_by: int | None = None
    is_cancelled: bool = False


class Attempt:
    """One at making a queue pair, which ends when the model says so."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self._gate, self._ended = threading.Event(), threading.Event()
        self._is_made, self._near = False, 0
        self.far: QueuePair = Device(wires).queue_pair(1, 1, RECEIVE_DEPTH, 1 << 30)
        self.far.receive(RECEIVE_DEPTH)

    def run(self, link: Any, rail: int, epoch: int, nic: int, remote: int) -> None:
        """On a thread of the engine's."""
        assert self._gate.wait(TIMEOUT_S)
        try:
            if not self._is_made:
                raise OSError(errno.ETIMEDOUT, "nobody answers")
            near = Device(self._wires).queue_pair(1, 512, 1, 1 << 30)
            self._near = near.number
            near.connect(self.far.number)
            self.far.connect(near.number)
            link.add_qp(near.address, rail, epoch, nic, remote, 0)
            near.disown()
        finally:
            self._ended.set()

    def end(self, is_made: bool) -> None:
        self._is_made = is_made
        self._gate.set()
        assert self._ended.wait(TIMEOUT_S)

    def is_destroyed(self) -> bool:
        """Its queue pair at the engine's side: nobody can be connected with it."""
        with contextlib.suppress(OSError):
            Device(self._wires).queue_pair(1, 1, 1, 1).connect(self._near)
            return False
        return True


def lives(state: int) -> int:
    """The state, whether or not the rail is suspected: what is held back makes it so in time."""
    return RailState.RAIL_UP if state == RailState.RAIL_SUSPECT else state


@dataclass
class Rail:
    attempts: dict[int, Attempt] = field(default_factory=dict)  # under way, by epoch
    epoch: int = 0  # of the newest that was asked for
    far: QueuePair | None = None  # of one that is up, or was lost
    lost: list[int] | None = None  # of one that died: the writes that it carried
    is_probed: bool = False  # nothing else can go by it yet


class Owner(RuleBasedStateMachine):
    @initialize()
    def connect(self) -> None:
        self.undo = contextlib.ExitStack()
        self.rails = [Rail(), Rail()]
        self.asked: list[Asked] = []
        self.marks: set[int] = set()
        self.next_mark, self.is_held = 1, False
        self.lock = threading.Lock()
        self.undo.enter_context(patch.object(link_module, "build_rail", self.build))
        for name in ("BUILD_TIMEOUT_S", "PROBE_TIMEOUT_S"):
            self.undo.enter_context(patch.object(link_module, name, TIMEOUT_S))
        self.wires = Wires()
        self.engine = self.undo.enter_context(
            NullEngine(
                self.wires,
                nics=2,
                max_queued_transfers=MOST,
                rail_backoff_max_s=0.001,
                rail_timeout_s=TIMEOUT_S,
                stall_timeout_s=TIMEOUT_S,
            )
        )
        self.memory = np.zeros(NBYTES, np.uint8)
        self.region = self.engine.register(self.memory)
        listener = self.undo.enter_context(RawDirectListener(self.wires))
        pool = self.undo.enter_context(ThreadPoolExecutor(1))
        connecting = pool.submit(self.engine.connect, listener.card, TIMEOUT_S)
        for rail in self.rails:
            self.await_attempt(rail, 1)
            self.come_up(rail)
        self.peer: te.Peer = connecting.result(TIMEOUT_S)
        self.raw = listener.next_link()
        self.raw.send(table([(FAR, FAR + NBYTES)]))
        link = self.peer._opened.link
        assert isinstance(link, RailedLink)
        self.link = link
        self.settle()

    def build(
        self, _local: Any, link: Any, _nic: Any, rail: int, epoch: int, path: Any, _: Any
    ) -> None:
        attempt = Attempt(self.wires)
        with self.lock:
            self.rails[rail].attempts[epoch] = attempt
        attempt.run(link, rail, epoch, path.nic.index, path.remote)

    # -- rails

    def await_attempt(self, rail: Rail, epoch: int) -> None:
        rail.epoch = epoch
        wait_until(lambda: epoch in rail.attempts, "it is to be made")

    def come_up(self, rail: Rail) -> None:
        with self.lock:
            attempt = rail.attempts.pop(rail.epoch)
        attempt.end(is_made=True)
        rail.far, rail.is_probed = attempt.far, True

    def up(self) -> list[int]:
        """Those that can die."""
        return [i for i, one in enumerate(self.rails) if one.far is not None and one.lost is None]

    def lost(self) -> list[int]:
        return [i for i, one in enumerate(self.rails) if one.lost is not None]

    def down(self) -> list[int]:
        """Those of which an attempt is under way."""
        return [i for i, one in enumerate(self.rails) if one.far is None]

    def late(self) -> list[tuple[int, int]]:
        """Attempts that have not ended, and nobody waits for: the rail, the epoch."""
        with self.lock:
            return [
                (i, epoch)
                for i, one in enumerate(self.rails)
                for epoch in one.attempts
                if epoch < one.epoch
            ]

    def carriers(self) -> list[Rail]:
        return [self.rails[i] for i in self.up() if not self.rails[i].is_probed]

    def state(self, rail: Rail) -> int:
        return self.link.rows[self.rails.index(rail)].state

    def settle(self) -> None:
        """What rails carry is over, unless completions are held back."""
        if self.is_held:
            return
        for rail in self.rails:
            if rail.is_probed:
                wait_until(lambda one=rail: self.state(one) == RailState.RAIL_UP, "it is up")
                rail.is_probed = False
        for one in list(self.asked):
            if one.place in (Place.WAITING, Place.FLYING) and self.carriers():
                if one.is_read:
                    self.ends(one, DONE)
                    continue
                wait_until(lambda one=one: one.mark in self.marks or self.look(), "it has landed")
                one.place = Place.SENT
        wait_until(lambda: self.flying() == 0, "the source knows that it has")

    def flying(self) -> int:
        """Bytes on rails that have not died."""
        rows = zip(self.rails, self.link.rows, strict=True)
        return sum(row.in_flight_nbytes for rail, row in rows if rail.lost is None)

    def look(self) -> None:
        """Which marks have come to the destination."""
        for rail in self.carriers():
            assert rail.far is not None
            self.marks.update(mark for _, mark in rail.far.poll() if mark is not None)

    def goes(self, one: Asked) -> None:
        """A rail can take it from now on."""
        one.place = Place.FLYING if self.carriers() else Place.WAITING

    # -- frames and outcomes

    def take(self, kind: Kind) -> Frame:
        frame = self.raw.frame()
        assert frame is not None
        assert frame.kind is kind
        return frame

    def ends(self, one: Asked, status: te.Status) -> None:
        assert outcome(one.transfer) is status
        self.asked.remove(one)

    def abandoned(self, *those: Asked) -> None:
        """The source gives them up, and they end once the destination has agreed."""
        told = {self.take(Kind.ABANDON).transfer for _ in those}
        assert told == {one.number for one in those}
        for one in those:
            self.raw.send(ack(one.number, AckStatus.ABANDONED))
            self.ends(one, CANCELLED)

    def pick(self, i: int, *places: Place, is_read: bool = False) -> Asked | None:
        found = [one for one in self.asked if one.place in places and one.is_read == is_read]
        return found[i % len(found)] if found else None

    # -- commands

    def submit(self, is_read: bool) -> Asked | None:
        here = self.memory.ctypes.data
        call = self.peer.read if is_read else self.peer.write
        blocks = te.Blocks.of(*((FAR, here) if is_read else (here, FAR)), NBYTES)
        if len(self.asked) == MOST:
            with pytest.raises(te.QueueFull):
                call(blocks)
            return None
        transfer = call(blocks)
        number = self.take(Kind.ASK).transfer
        one = Asked(transfer, number, is_read, self.next_mark << 16)
        self.asked.append(one)
        self.next_mark += 1
        return one

    @rule(is_granted=st.booleans(), is_held=st.booleans())
    def write(self, is_granted: bool, is_held: bool) -> None:
        one = self.submit(False)
        if one is not None and is_granted:
            if is_held and not self.is_held:
                self.hold_or_give_out_completions()
            self.let(one)

    @precondition(lambda self: not any(one.is_read for one in self.asked))
    @rule(is_granted=st.booleans())
    def read(self, is_granted: bool) -> None:
        one = self.submit(True)
        if one is not None and is_granted:
            self.let(one)

    @precondition(lambda self: self.asked)
    @rule(i=ANY)
    def cancel(self, i: int) -> None:
        """What is all sent goes on, also by a rail that may come back."""
        one = self.pick(i, *Place)
        if one is None:
            return
        one.transfer.cancel()
        one.is_cancelled = True
        if one.place in (Place.ASKED, Place.WAITING):
            self.abandoned(one)

    # -- what the destination says

    @precondition(lambda self: any(one.place is Place.ASKED for one in self.asked))
    @rule(i=ANY, is_read=st.booleans())
    def grant(self, i: int, is_read: bool) -> None:
        one = self.pick(i, Place.ASKED, is_read=is_read)
        if one is not None:
            self.let(one)

    def let(self, one: Asked) -> None:
        flying = self.flying()
        mark = 0 if one.is_read else one.mark
        self.raw.send(header(Kind.ACK, status=AckStatus.GRANTED, transfer=one.number, tag=mark))
        self.goes(one)
        if self.is_held and one.place is Place.FLYING:
            wait_until(lambda: self.flying() > flying, "it is posted")
        self.settle()

    @precondition(lambda self: any(one.place is Place.SENT for one in self.asked))
    @rule(i=ANY)
    def land(self, i: int) -> None:
        one = self.pick(i, Place.SENT)
        if one is not None:
            self.raw.send(ack(one.number, AckStatus.LANDED))
            self.ends(one, DONE)

    @precondition(lambda self: self.asked)
    @rule(i=ANY)
    def refuse(self, i: int) -> None:
        one = self.pick(i, Place.ASKED, Place.SENT)
        if one is not None:
            self.raw.send(ack(one.number, AckStatus.REFUSED, b"no"))
            if one.place is Place.SENT:
                assert self.take(Kind.ABANDON).transfer == one.number
            self.ends(one, FAILED)

    # -- what devices do

    @rule()
    def hold_or_give_out_completions(self) -> None:
        self.is_held = not self.is_held
        self.wires.hold(self.is_held)
        self.settle()

    @precondition(lambda self: self.up())
    @rule(i=RAILS)
    def a_rail_dies(self, i: int) -> None:
        at = self.up()[i % len(self.up())]
        rail = self.rails[at]
        self.raw.send(word(Kind.RAIL_BROKEN, at, rail.epoch, []))
        frame = self.take(Kind.RAIL_LOST)
        assert (frame.transfer, frame.tag) == (at, rail.epoch)
        rail.lost, rail.is_probed = np.frombuffer(frame.body, np.uint64)[::2].tolist(), False
        has_read = self.link.rows[at].in_flight_nbytes > NBYTES * len(rail.lost)
        for one in self.asked:
            if one.number in rail.lost or (one.is_read and one.place is Place.FLYING and has_read):
                assert one.place is Place.FLYING
                one.place, one.lost_by = Place.LOST, at

    @precondition(lambda self: self.lost())
    @rule(i=RAILS, has_landed=st.booleans())
    def the_destination_closes_its_end(self, i: int, has_landed: bool) -> None:
        at = self.lost()[i % len(self.lost())]
        rail = self.rails[at]
        landed = [(number, 0) for number in rail.lost or () if has_landed]
        rail.far = rail.lost = None
        self.raw.send(word(Kind.RAIL_CLOSED, at, rail.epoch, landed))
        given_up = []
        for one in [one for one in self.asked if one.lost_by == at]:
            one.lost_by = None
            if has_landed and not one.is_read:
                one.place = Place.SENT
            elif one.is_cancelled and not one.is_read:
                given_up.append(one)
            else:
                self.goes(one)
        self.abandoned(*given_up)
        self.await_attempt(rail, rail.epoch + 1)
        self.settle()

    # -- who makes queue pairs

    @precondition(lambda self: self.down())
    @rule(i=RAILS, is_made=st.booleans())
    def an_attempt_ends(self, i: int, is_made: bool) -> None:
        rail = self.rails[self.down()[i % len(self.down())]]
        if is_made:
            self.come_up(rail)
            wait_until(lambda: self.state(rail) != RailState.RAIL_BUILDING, "its worker has it")
            self.settle()
            return
        with self.lock:
            attempt = rail.attempts.pop(rail.epoch)
        attempt.end(is_made=False)
        self.await_attempt(rail, rail.epoch + 1)

    @precondition(lambda self: self.down())
    @rule(i=RAILS)
    def an_attempt_is_given_up(self, i: int) -> None:
        """It has not ended, and comes too late from now on."""
        at = self.down()[i % len(self.down())]
        rail = self.rails[at]
        if len(rail.attempts) <= LATE_MOST:
            self.link.handle.refuse_rail(at, rail.epoch, "it takes too long")
            self.await_attempt(rail, rail.epoch + 1)

    @precondition(lambda self: self.late())
    @rule(i=ANY, is_made=st.booleans())
    def a_late_attempt_ends(self, i: int, is_made: bool) -> None:
        at, epoch = self.late()[i % len(self.late())]
        with self.lock:
            attempt = self.rails[at].attempts.pop(epoch)
        before = self.link.rows[at]
        attempt.end(is_made)
        if is_made:
            wait_until(attempt.is_destroyed, "nobody waits for it any more")
        after = self.link.rows[at]
        assert (after.epoch, lives(after.state)) == (before.epoch, lives(before.state))

    # -- the end, at any step

    def teardown(self) -> None:
        with self.undo:
            if self.next_mark % 2:
                self.raw.close()
            else:
                self.peer.close()
            for one in list(self.asked):
                self.ends(one, FAILED)
            self.engine.deregister(self.region, TIMEOUT_S)
            self.raw.close()
            with self.lock:
                attempts = [one for rail in self.rails for one in rail.attempts.values()]
            for attempt in attempts:
                attempt.end(is_made=False)


TestOwner = pytest.mark.slow(Owner.TestCase)
TestOwner.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
