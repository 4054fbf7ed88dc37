# SPDX-License-Identifier: Apache-2.0
"""Staging by hand: who gets slots when, and what becomes of them when copies fail, hang, or outlive
their channel."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_sealed import sealed
from te_staging import (
    COPIED,
    COPYING,
    HELD,
    HOST_KIND,
    HandKind,
    KindStruct,
    Lane,
    Range,
    Slot,
    Staging,
)

SLOT_BYTES = 4096
LINK, OTHER_LINK, RIGHT, OTHER_RIGHT = 0x10, 0x20, 0x30, 0x40


@dataclass
class Hand:
    """A ring of two slots, a lane, and a kind whose copies end when the test says so."""

    ring: Staging
    lane: Lane
    kind: HandKind

    @property
    def span(self) -> Range:
        return (self.kind.struct, 0x1000, 100)

    def take(self, lane: Lane | None = None) -> Slot:
        slot = (lane or self.lane).take()
        assert slot is not None
        return slot

    def end(self, answer: int = 0) -> None:
        """The oldest batch."""
        self.kind.end(self.kind.events[0], answer)


@pytest.fixture
def hand() -> Iterator[Hand]:
    ring = Staging(2, SLOT_BYTES)
    made = Hand(ring, Lane(ring, 1), HandKind())
    yield made
    made.lane.drop()
    for event in made.kind.events:
        made.kind.end(event)
    assert ring.close()
    assert made.kind.events == []


@pytest.mark.parametrize(("nbytes", "slot_bytes"), [(0, 10), (9, 10), (10, 0), (650, 10)])
def test_none_or_too_many_slots_are_refused(nbytes: int, slot_bytes: int) -> None:
    ring = Staging(1, SLOT_BYTES)
    assert ring.open(nbytes, slot_bytes) == errno.EINVAL
    assert ring.open(640, 10) == 0


def test_slots_are_given_and_taken_in_turn(hand: Hand) -> None:
    second, third = Lane(hand.ring, 2), Lane(hand.ring, 3)
    hand.take()
    hand.take()
    assert [lane.take() for lane in (second, third, hand.lane, second)] == [None] * 4
    assert (hand.ring.next(), hand.ring.is_scarce) == (None, True)
    hand.lane.give()
    assert (hand.ring.next(), hand.ring.is_scarce) == (2, False)
    # A slot is free, but it is another's turn.
    assert third.take() is None
    assert hand.lane.take() is None
    second.leave()
    assert hand.ring.next() == 3
    hand.take(third)
    hand.lane.give()
    assert hand.ring.next() == 1  # It has asked again.
    hand.take()
    assert hand.ring.next() is None
    third.drop()


def test_a_lane_that_goes_stands_in_nobodys_way(hand: Hand) -> None:
    second, third = Lane(hand.ring, 2), Lane(hand.ring, 3)
    hand.take()
    hand.take()
    assert second.take() is third.take() is None
    third.drop()
    third.leave()
    second.leave()
    hand.lane.give()
    assert hand.ring.next() is None
    hand.take()


def test_a_copy_holds_its_slot_until_it_is_over(hand: Hand) -> None:
    slot = hand.take()
    slot.gather([hand.span])
    assert (slot.state, hand.ring.copying, hand.ring.poll()) == (COPYING, 1, 0)
    hand.lane.drop()
    taken = [hand.lane.take(), hand.lane.take()]
    assert taken[0] is not None
    assert taken[1] is None
    assert not hand.ring.close()
    hand.end()
    assert (hand.ring.poll(), hand.ring.copying, hand.ring.next()) == (1, 0, 1)
    hand.take()


def test_a_slot_is_copied_to_and_from_in_order(hand: Hand) -> None:
    slot = hand.take()
    spans = [(hand.kind.struct, 0x1000, 10), (hand.kind.struct, 0x9000, 0)]
    spans.append((hand.kind.struct, 0x2000, 30))
    base = hand.ring.base + slot.number * SLOT_BYTES
    slot.gather(spans)
    assert hand.kind.batches[1] == [(base, 0x1000, 10), (base + 10, 0x2000, 30)]
    hand.end()
    hand.ring.poll()
    assert (slot.state, slot.fault, slot.nbytes) == (COPIED, 0, 40)
    other = hand.take()
    base = hand.ring.base + other.number * SLOT_BYTES
    other.scatter(spans)
    assert hand.kind.batches[2] == [(0x1000, base, 10), (0x2000, base + 10, 30)]


def test_each_kind_copies_its_own(hand: Hand) -> None:
    """A transfer may have the pages of a GPU and a few bytes of host memory in one segment."""
    memory = np.frombuffer(b"abcdef", np.uint8)
    near, other = memory.ctypes.data, HandKind()
    slot = hand.take()
    slot.gather(
        [(HOST_KIND, near, 2), hand.span, (other.struct, 0x5000, 5), (HOST_KIND, near + 2, 4)]
    )
    assert bytes(slot.view[:2]) == b"ab"
    assert bytes(slot.view[107:111]) == b"cdef"
    assert [size for _, _, size in (*hand.kind.batches[1], *other.batches[1])] == [100, 5]
    other.end(1)
    assert (hand.ring.poll(), slot.state, other.events) == (0, COPYING, [])
    hand.end()
    assert (hand.ring.poll(), slot.state) == (1, COPIED)


def test_host_memory_is_copied_at_once(hand: Hand) -> None:
    slot = hand.take()
    slot.scatter([(HOST_KIND, np.zeros(8, np.uint8).ctypes.data, 8)])
    assert (slot.state, slot.fault, hand.ring.copying) == (COPIED, 0, 0)


def test_a_fault_shows_when_no_batch_is_left(hand: Hand) -> None:
    other = HandKind()
    slot = hand.take()
    slot.gather([hand.span, (other.struct, 0x5000, 5)])
    hand.end(errno.EIO)
    other_slot = hand.take()
    other_slot.gather([hand.span])
    assert (hand.ring.poll(), slot.state) == (0, COPYING)
    other.end(1, errno.EFAULT)
    assert hand.ring.poll() == 1
    assert (slot.state, slot.fault) == (COPIED, errno.EIO)
    assert other_slot.state == COPYING


def test_a_batch_that_is_refused_waits_for_those_before(hand: Hand) -> None:
    other = HandKind()
    other.refusal = errno.ENOMEM
    slot = hand.take()
    slot.gather([hand.span, (other.struct, 0x5000, 5)])
    assert slot.state == COPYING
    hand.end()
    hand.ring.poll()
    assert (slot.state, slot.fault) == (COPIED, errno.ENOMEM)


def test_what_cannot_be_copied_is_a_fault(hand: Hand) -> None:
    no_copier = KindStruct()
    host = np.zeros(8, np.uint8).ctypes.data
    kinds = [HandKind() for _ in range(17)]
    for spans, fault in [
        ([], errno.EINVAL),
        ([(HOST_KIND, host, 0)], errno.EINVAL),
        ([(HOST_KIND, host, SLOT_BYTES + 1)], errno.EMSGSIZE),
        ([(HOST_KIND, host, 1 << 63), (HOST_KIND, host, 1 << 63)], errno.EMSGSIZE),
        ([(HOST_KIND, host, 1)] * 1025, errno.E2BIG),
        ([(ctypes.addressof(no_copier), host, 1)], errno.EOPNOTSUPP),
    ]:
        slot = hand.take()
        slot.gather(spans)
        assert (slot.state, slot.fault) == (COPIED, fault)
        hand.lane.give()
    slot = hand.take()
    slot.gather([(one.struct, 0x1000, 1) for one in kinds])
    assert [len(one.events) for one in kinds] == [1] * 16 + [0]
    for one in kinds[:16]:
        one.end(1)
    hand.ring.poll()
    assert slot.fault == errno.E2BIG


def test_a_device_that_hangs_is_told_of_and_its_memory_kept() -> None:
    with sealed() as kind:
        ring, memory = Staging(1, SLOT_BYTES), kind.allocate(SLOT_BYTES)
        unpin = kind.pin(ring.base, SLOT_BYTES)
        slot = Lane(ring, 1).take()
        assert slot is not None
        with kind.stuck():
            slot.scatter([(kind.struct, memory.address, 1)], LINK, RIGHT)
            assert not ring.ended(ring.mark(), LINK, RIGHT)
            assert not ring.close()
        while not ring.close():
            os.sched_yield()
        assert memory.view[0] == slot.view[0]
        unpin()


def test_a_fence_waits_for_the_copies_of_its_own(hand: Hand) -> None:
    slot, other = hand.take(), hand.take()
    slot.scatter([hand.span], LINK, RIGHT)
    mark = hand.ring.mark()
    other.scatter([hand.span], LINK, OTHER_RIGHT)
    for link, right, ended in [
        (LINK, RIGHT, False),
        (LINK, 0, False),
        (0, RIGHT, False),
        (0, 0, False),
        (OTHER_LINK, 0, True),
        (0, OTHER_RIGHT, True),  # it began after the mark
    ]:
        assert hand.ring.ended(mark, link, right) is ended
    assert not hand.ring.ended(hand.ring.mark(), 0, OTHER_RIGHT)
    hand.lane.drop()  # A channel that has gone has still copies under way.
    assert not hand.ring.ended(mark, LINK, RIGHT)
    hand.end()
    assert hand.ring.ended(mark, 0, 0)  # It has looked by itself.
    assert not hand.ring.ended(hand.ring.mark(), LINK, 0)


# -- the accounts of a ring, against a model


class Model:
    """What a ring must do, in lists."""

    def __init__(self, slots: int, lanes: int) -> None:
        self.free = slots
        self.lanes: list[list[str]] = [[] for _ in range(lanes)]
        self.waiting: list[int] = []
        self.orphans = 0

    def take(self, lane: int) -> bool:
        if self.free and self.waiting[:1] in ([], [lane]):
            self.leave(lane)
            self.free -= 1
            self.lanes[lane].append("held")
            return True
        if lane not in self.waiting:
            self.waiting.append(lane)
        return False

    def leave(self, lane: int) -> None:
        self.waiting = [one for one in self.waiting if one != lane]

    def drop(self, lane: int) -> None:
        self.leave(lane)
        under_way = self.lanes[lane].count("copying")
        self.orphans += under_way
        self.free += len(self.lanes[lane]) - under_way
        self.lanes[lane] = []


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "copy", "copy", "end", "give", "leave", "drop"]),
        st.integers(0, 3),
        st.integers(0, 7),
    ),
    max_size=60,
)
WORDS = {"held": HELD, "copying": COPYING, "copied": COPIED}


@pytest.mark.slow
@given(STEPS, st.integers(1, 5))
def test_slots_are_neither_lost_nor_given_twice(
    steps: list[tuple[str, int, int]], slots: int
) -> None:
    ring, kind, model = Staging(slots, SLOT_BYTES), HandKind(), Model(slots, 4)
    lanes = [Lane(ring, i + 1) for i in range(4)]
    events: dict[int, tuple[int, Slot] | None] = {}
    for what, number, choice in steps:
        lane, states = lanes[number], model.lanes[number]
        if what == "take":
            assert (lane.take() is not None) is model.take(number)
        elif what == "copy" and "held" in states:
            i = states.index("held")
            lane.slots[i].gather([(kind.struct, 0x1000, 100)])
            states[i] = "copying"
            events[kind.events[-1]] = (number, lane.slots[i])
        elif what == "end" and kind.events:
            event = kind.events[choice % len(kind.events)]
            kind.end(event, choice)  # with an errno or not
            assert ring.poll() == 1
            _account(model, lanes, events.pop(event), choice)
        elif what == "give" and states[:1] in (["held"], ["copied"]):
            lane.give()
            states.pop(0)
            model.free += 1
        elif what == "leave":
            lane.leave()
            model.leave(number)
        elif what == "drop":
            for event, found in events.items():
                if found is not None and found[0] == number:
                    events[event] = None
            lane.drop()
            model.drop(number)
        _compare(ring, lanes, model)
    for lane in lanes:
        lane.drop()
    assert ring.close() is not bool(kind.events)
    for event in kind.events:
        kind.end(event)
    if events:
        assert ring.close()


def _account(model: Model, lanes: list[Lane], found: tuple[int, Slot] | None, fault: int) -> None:
    if found is None:
        model.orphans -= 1
        model.free += 1
        return
    number, slot = found
    model.lanes[number][lanes[number].slots.index(slot)] = "copied"
    assert slot.fault == fault


def _compare(ring: Staging, lanes: list[Lane], model: Model) -> None:
    states = [[slot.state for slot in lane.slots] for lane in lanes]
    assert states == [[WORDS[word] for word in words] for words in model.lanes]
    numbers = [slot.number for lane in lanes for slot in lane.slots]
    assert len(set(numbers)) == len(numbers)
    copying = sum(words.count("copying") for words in model.lanes) + model.orphans
    assert ring.copying == copying
    assert ring.is_scarce is (model.free == 0 and bool(model.waiting))
    turn = model.waiting[0] + 1 if model.free and model.waiting else None
    assert ring.next() == turn
