# SPDX-License-Identifier: Apache-2.0
"""The owner of a link at its destination as a model: frames in halves by either connection, tags
that open and close, memory that goes, and an end at any step. The source is by hand, so each step
has one outcome: no byte lands behind a fence, and each transfer is answered once."""

from __future__ import annotations

import contextlib
import itertools
import select
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from te_far import wait_until
from te_frames import HEADER, AckStatus, Kind, abandon, segment, trailer
from te_raw import RawSource, dial, hello, read_exactly, read_greeting

import te

TIMEOUT_S: Final = 60.0
HALF: Final = 1 << 10
FRAME: Final = 2 * HALF
NBYTES: Final = 2 * FRAME
ROWS: Final = 24
CONFIG: Final = te.Config(
    transports=("tcp",),
    workers=2,
    rails=2,
    connect_timeout_s=TIMEOUT_S,
    stall_timeout_s=TIMEOUT_S,
)
#: What lies in a row before anything lands, what a source sends, and what the row's owner writes
#: once nothing can land there any more.
BEFORE, SENT, AFTER = 1, 9, 3
RAILS: Final = st.integers(0, 1)
ANY: Final = st.integers(0, ROWS)
_numbers = itertools.count(1)


@dataclass
class Write:
    """A transfer of two frames into a row of its own."""

    number: int
    tag: int
    row: int
    #: Whether anything of it can land.
    is_open: bool
    begun: int = 0
    ended: int = 0
    is_over: bool = False  # the source sends no more of it
    answer: AckStatus | None = None


class Destination(RuleBasedStateMachine):
    @initialize()
    def connect(self) -> None:
        self.undo = contextlib.ExitStack()
        self.engine = self.undo.enter_context(te.Engine(CONFIG))
        self.memory = np.full((ROWS, NBYTES), BEFORE, np.uint8)
        self.regions = [self.engine.register(row, remote="read-write") for row in self.memory]
        card, link = self.engine.card(), (1 << 40) + next(_numbers)
        first = RawSource(card, link=link).sock
        second = dial(card)
        self.rails = [self.undo.enter_context(contextlib.closing(one)) for one in (first, second)]
        second.sendall(hello(second, card, link=link))
        assert read_greeting(second) is not None
        self.writes: list[Write] = []
        self.halves: dict[int, Write] = {}  # by rail: half of a frame's payload has come
        self.arrived: dict[int, int] = {}  # of the tags that are open
        self.tags = 0

    # -- the source

    @rule(rail=RAILS, i=ANY, j=ANY, is_new=st.booleans())
    def begin_a_frame(self, rail: int, i: int, j: int, is_new: bool) -> None:
        """Of a new write, under a tag that is open, was, or never has been; or the second one."""
        if rail in self.halves:
            return
        waiting = [one for one in self.writes if one.begun == 1 and not one.is_over]
        if waiting and not is_new:
            write = waiting[i % len(waiting)]
        elif len(self.writes) < ROWS:
            row, tag = len(self.writes), 1 + j % (self.tags + 1)
            is_open = tag in self.arrived and self.regions[row] is not None
            write = Write(row + 1, tag, row, is_open)
            self.writes.append(write)
        else:
            return
        at = write.begun * FRAME
        landing = (self.memory[write.row].ctypes.data + at, FRAME)
        head = segment(write.number, write.tag, [landing], FRAME, NBYTES)
        self.rails[rail].sendall(head + bytes([SENT]) * HALF)
        write.begun += 1
        self.halves[rail] = write
        if write.is_open:
            into = self.memory[write.row, at : at + HALF]
            wait_until(lambda: (into == SENT).all(), "half of it has landed")
        else:  # Before its tag may be opened.
            self.hear(write)

    @precondition(lambda self: self.halves)
    @rule(rail=RAILS)
    def end_a_frame(self, rail: int) -> None:
        write = self.halves.pop(rail, None)
        if write is None:
            return
        self.rails[rail].sendall(bytes([SENT]) * HALF + trailer())
        write.ended += 1
        if not write.is_open:
            write.is_over = True
            self.hear(write)
        elif write.ended == 2:
            write.is_over = True
            self.hear(write)
            assert write.answer is AckStatus.LANDED
            self.arrived[write.tag] += 1
            assert (self.memory[write.row] == SENT).all()

    @rule(rail=RAILS, i=ANY)
    def abandon_a_write(self, rail: int, i: int) -> None:
        """Of which one frame has come, and no more will."""
        found = [one for one in self.writes if one.begun == one.ended == 1 and not one.is_over]
        if not found or rail in self.halves:
            return
        write = found[i % len(found)]
        self.rails[rail].sendall(abandon(write.number, write.tag, FRAME))
        write.is_over = True
        self.hear(write)
        assert write.answer is (AckStatus.ABANDONED if write.is_open else AckStatus.REFUSED)
        self.shut(write)

    def hear(self, write: Write) -> None:
        """The answer to a write, if that has not come yet."""
        while write.answer is None:
            ready, _, _ = select.select(self.rails, [], [], TIMEOUT_S)
            data = read_exactly(ready[0], HEADER.size)
            assert data is not None
            kind, status, _, count, transfer, _, _, _ = HEADER.unpack(data)
            assert kind == Kind.ACK
            assert read_exactly(ready[0], count) is not None
            if status != AckStatus.PROGRESS:
                told = self.writes[transfer - 1]
                assert told.answer is None, "it is answered once"
                told.answer = AckStatus(status)

    # -- the destination

    def shut(self, *writes: Write) -> None:
        """Nothing of them lands any more: their rows are used for something else."""
        for one in writes:
            one.is_open = False
            self.memory[one.row] = AFTER

    @rule()
    def expect(self) -> None:
        self.tags += 1
        self.engine.expect(self.tags)
        self.arrived[self.tags] = 0

    @precondition(lambda self: self.arrived)
    @rule(i=ANY, at_once=st.booleans())
    def fence(self, i: int, at_once: bool) -> None:
        """Also one under which half of a frame has come: the rest of it is thrown away."""
        tag = sorted(self.arrived)[i % len(self.arrived)]
        if at_once:
            revoked = self.engine.revoke(tag)
            assert revoked is not None
            count = revoked.wait(TIMEOUT_S)
        else:
            count = self.engine.fence(tag, TIMEOUT_S)
        assert count == self.arrived.pop(tag)
        self.shut(*(one for one in self.writes if one.tag == tag and not one.is_over))

    @rule(i=ANY)
    def deregister(self, i: int) -> None:
        """Also memory that half of a frame has come to, or that is to be written next."""
        row = i % ROWS
        region = self.regions[row]
        if region is not None:
            self.engine.deregister(region, TIMEOUT_S)
            self.regions[row] = None
            self.shut(*(one for one in self.writes if one.row == row))

    # -- the end, at any step

    def teardown(self) -> None:
        """A connection goes, and the link with it, whatever was under way."""
        with self.undo:
            self.rails[len(self.writes) % 2].close()
            for tag, count in self.arrived.items():
                assert self.engine.fence(tag, TIMEOUT_S) == count
            wait_until(lambda: self.engine.stats().rails == 0, "the link has ended")
            for region in self.regions:
                if region is not None:
                    self.engine.deregister(region, TIMEOUT_S)
            for write in self.writes:
                if not write.is_open:
                    assert write.answer in (None, AckStatus.REFUSED, AckStatus.ABANDONED)
                    assert SENT not in self.memory[write.row]


TestDestination = pytest.mark.slow(Destination.TestCase)
TestDestination.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
