# SPDX-License-Identifier: Apache-2.0
"""The owner of a link as a model: commands, answers and halves of payload in any order, by either
connection, and an end at any step. The destination is by hand, so each step has one outcome."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from te_contract import cancel, outcome
from te_far import wait_until
from te_frames import REPLY, AckStatus, Kind, ack, segment, trailer
from te_two_rails import TwoRails

import te

TIMEOUT_S: Final = 60.0
NBYTES: Final = 1 << 12
FAR: Final = 1 << 20
MOST: Final = 5
CONFIG: Final = te.Config(
    transports=("tcp",),
    workers=2,
    rails=2,
    max_queued_transfers=MOST,
    connect_timeout_s=TIMEOUT_S,
    stall_timeout_s=TIMEOUT_S,
)
DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED
RAILS: Final = st.integers(0, 1)
ANY: Final = st.integers(0, MOST - 1)


@dataclass
class Asked:
    """A transfer that the destination knows of."""

    transfer: te.Transfer
    number: int
    into: Any  # of a read: where it lands
    is_cancelled: bool = False
    has_begun: bool = False  # a reply to it
    said: AckStatus | None = None  # of that


class Owner(RuleBasedStateMachine):
    @initialize()
    def connect(self) -> None:
        self.undo = contextlib.ExitStack()
        self.engine = self.undo.enter_context(te.Engine(CONFIG))
        self.src = np.full(NBYTES, 7, np.uint8)
        self.dst = np.zeros((64, NBYTES), np.uint8)
        self.regions = [self.engine.register(self.src), self.engine.register(self.dst)]
        self.link = self.undo.enter_context(contextlib.closing(TwoRails(self.engine)))
        self.asked: list[Asked] = []
        self.reads = self.replies = 0
        self.halves: dict[int, Asked] = {}  # by rail: half of the payload has come

    def free(self, rail: int) -> bool:
        return rail not in self.halves

    def pick(self, i: int, is_read: bool) -> Asked | None:
        """One of that kind which was not answered yet."""
        found = [one for one in self.asked if (one.into is not None) == is_read]
        found = [one for one in found if not one.has_begun]
        return found[i % len(found)] if found else None

    def pending(self) -> int:
        return sum(not (one.is_cancelled and one.into is not None) for one in self.asked)

    def ends(self, one: Asked, status: te.Status) -> None:
        assert outcome(one.transfer) is status
        self.asked.remove(one)

    def frame(self) -> tuple[Kind, int]:
        """The next one. A reply to a cancelled read is refused at once, or when its connection is
        looked at next; so that may come before what is waited for."""
        kind, status, number, sock = self.link.frame()
        if kind == Kind.ACK:
            self.halves[self.link.rails.index(sock)].said = AckStatus(status)
        return kind, number

    def take(self, kind: Kind) -> int:
        while True:
            found, number = self.frame()
            if found != Kind.ACK:
                assert found == kind
                return number

    def hear(self, one: Asked) -> None:
        while one.said is None:
            assert self.frame()[0] == Kind.ACK

    # -- commands

    def submit(self, is_read: bool, address: int) -> te.Transfer | None:
        call = self.link.peer.read if is_read else self.link.peer.write
        blocks = te.Blocks.of(*((FAR, address) if is_read else (address, FAR)), NBYTES)
        if self.pending() < MOST:
            return call(blocks)
        with pytest.raises(te.QueueFull):
            call(blocks)
        return None

    @rule()
    def write(self) -> None:
        transfer = self.submit(False, self.src.ctypes.data)
        if transfer is not None:
            number = self.take(Kind.SEGMENT)
            self.asked.append(Asked(transfer, number, None))

    @precondition(lambda self: self.reads < len(self.dst))
    @rule()
    def read(self) -> None:
        into = self.dst[self.reads]
        transfer = self.submit(True, into.ctypes.data)
        if transfer is not None:
            number = self.take(Kind.READ)
            self.asked.append(Asked(transfer, number, into))
            self.reads += 1

    @precondition(lambda self: self.asked)
    @rule(i=ANY)
    def cancel(self, i: int) -> None:
        """A write that is all sent goes on; of a read nothing lands any more."""
        one = self.asked[i % len(self.asked)]
        cancel(one.transfer)
        one.is_cancelled = True
        if one.into is not None:
            assert outcome(one.transfer) is CANCELLED
            one.into[:] = 3

    # -- what the destination says

    @rule(i=ANY, rail=RAILS, is_good=st.booleans())
    def answer_a_write(self, i: int, rail: int, is_good: bool) -> None:
        one = self.pick(i, is_read=False)
        if one is None or not self.free(rail):
            return
        status = AckStatus.LANDED if is_good else AckStatus.REFUSED
        self.link.rails[rail].sendall(ack(one.number, status, b"" if is_good else b"no"))
        self.ends(one, DONE if is_good else FAILED)

    @rule(i=ANY, rail=RAILS)
    def begin_a_reply(self, i: int, rail: int) -> None:
        one = self.pick(i, is_read=True)
        if one is None or not self.free(rail):
            return
        self.replies += 1
        landing = (one.into.ctypes.data, NBYTES)
        head = segment(self.replies, one.number, [landing], NBYTES, flags=REPLY)
        self.link.rails[rail].sendall(head + bytes([9]) * (NBYTES // 2))
        one.has_begun = True
        self.halves[rail] = one
        if one.is_cancelled:
            self.hear(one)
        else:
            wait_until(lambda: (one.into[: NBYTES // 2] == 9).all(), "half of it has landed")

    @precondition(lambda self: self.halves)
    @rule(rail=RAILS)
    def end_a_reply(self, rail: int) -> None:
        one = self.halves.get(rail)
        if one is None:
            return
        self.link.rails[rail].sendall(bytes([9]) * (NBYTES // 2) + trailer())
        self.hear(one)
        del self.halves[rail]
        assert one.said is (AckStatus.REFUSED if one.is_cancelled else AckStatus.LANDED)
        self.ends(one, CANCELLED if one.is_cancelled else DONE)
        assert (one.into == (3 if one.is_cancelled else 9)).all()

    # -- the end, at any step

    def teardown(self) -> None:
        """A connection goes, or the peer is closed. Whatever was under way has an outcome then, and
        nothing holds the memory."""
        with self.undo:
            if self.replies % 2:
                self.link.rails[0].close()
            else:
                self.link.peer.close()
            for one in list(self.asked):
                is_over = one.is_cancelled and one.into is not None
                self.ends(one, CANCELLED if is_over else FAILED)
            for region in self.regions:
                self.engine.deregister(region, TIMEOUT_S)


TestOwner = pytest.mark.slow(Owner.TestCase)
TestOwner.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
