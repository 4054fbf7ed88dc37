# SPDX-License-Identifier: Apache-2.0
"""The life of a rail, with a fake clock: what it may do, and that it always comes back."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from te_compiled import function
from te_tables import read_table

from te.transports.rdma.rails import RailState

pytestmark = pytest.mark.pure

MS = 1_000_000
S = 1000 * MS
BUILD_NS, PROBE_NS, BACKOFF_NS, BACKOFF_MAX_NS, STEADY_NS = S, S, 50 * MS, S, 10 * S
NEVER_NS: Final = (1 << 64) - 1

RAILS_H: Final = Path(__file__).parents[2] / "te" / "transports" / "rdma" / "rails.h"
STATES, HAPPENINGS, TABLE = read_table(RAILS_H.read_text(), "RAIL_")

_function = functools.partial(function, "te.transports.rdma.rails")
_P, _U32, _U64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
_begin = _function("rail_begin", None, _P, _U32, _U64, _U64)
_happens = _function("rail_happens", ctypes.c_int, _P, _P, ctypes.c_int, _U64)
_due = _function("rail_due", _U64, _P, _P)
_late = _function("rail_late", ctypes.c_int, _P)
_hurry = _function("rail_hurry", None, _P, _P, _U64)


class Timing(ctypes.Structure):
    _fields_ = tuple(
        (name, _U64)
        for name in ("build_ns", "probe_ns", "backoff_ns", "backoff_max_ns", "steady_ns")
    )


class Rail(ctypes.Structure):
    """The struct of rails.pxd, up to what no rule looks at."""

    _fields_ = (
        ("state", ctypes.c_uint8),
        *((name, _U32) for name in ("epoch", "failures", "ways", "way", "downs", "ups")),
        ("has_carried", ctypes.c_int),
        *((name, _U64) for name in ("since_ns", "up_since_ns", "due_ns", "random")),
        ("rest", ctypes.c_char * 4096),
    )


TIMING = Timing(BUILD_NS, PROBE_NS, BACKOFF_NS, BACKOFF_MAX_NS, STEADY_NS)


class Life:
    """A source's rail under the rules of rails.pxd."""

    def __init__(self, ways: int, seed: int) -> None:
        self.rail = Rail()
        _begin(ctypes.byref(self.rail), ways, seed, 0)

    def happens(self, name: str, now: int) -> bool:
        """Takes a step; False where that cannot happen."""
        at, timing = ctypes.byref(self.rail), ctypes.byref(TIMING)
        return bool(_happens(at, timing, HAPPENINGS.index(name), now))

    def late(self) -> str:
        """What happens when ``due_ns`` has come."""
        return HAPPENINGS[_late(ctypes.byref(self.rail))]

    def hurry(self, now: int) -> None:
        _hurry(ctypes.byref(self.rail), ctypes.byref(TIMING), now)

    @property
    def due_ns(self) -> int | None:
        found = int(_due(ctypes.byref(self.rail), ctypes.byref(TIMING)))
        return None if found == NEVER_NS else found

    @property
    def row(self) -> dict[str, Any]:
        names = ("epoch", "failures", "way", "downs", "ups", "has_carried")
        state = RailState(self.rail.state).name.removeprefix("RAIL_")
        return {"state": state} | {name: getattr(self.rail, name) for name in names}


def rail(ways: int = 1, seed: int = 7) -> Life:
    return Life(ways, seed)


def state(one: Life) -> str:
    found: str = one.row["state"]
    return found


def due(one: Life) -> int:
    assert one.due_ns is not None
    return one.due_ns


def up(one: Life, now: int) -> None:
    """From DOWN, at once."""
    for name in ("IS_DUE", "IS_BUILT", "ANSWERS"):
        assert one.happens(name, now)


def down(now: int = 0, failures: int = 1, seed: int = 7) -> Life:
    """A rail that failed so many times, the last time at ``now``."""
    one = rail(seed=seed)
    up(one, 0)
    assert one.happens("FAILS", now)
    assert one.happens("IS_CLOSED", now)
    for _ in range(failures - 1):
        assert one.happens("IS_DUE", now)
        assert one.happens("NOT_MADE", now)
    assert one.row["failures"] == failures
    return one


def test_an_error_leads_back_over_a_new_queue_pair_and_a_probe() -> None:
    one = rail()
    up(one, 0)
    assert one.row["epoch"] == 1
    assert one.happens("FAILS", 5 * S)
    assert one.due_ns is None, "nothing is made before the destination has closed its end"
    assert one.happens("IS_CLOSED", 5 * S)
    assert due(one) > 5 * S
    assert one.late() == "IS_DUE"
    assert one.happens("IS_DUE", due(one))
    assert (state(one), one.row["epoch"]) == ("BUILDING", 2)
    assert one.happens("IS_BUILT", 6 * S)
    assert one.happens("ANSWERS", 6 * S)
    assert (state(one), one.row["ups"], one.row["downs"]) == ("UP", 2, 1)


def test_quiet_makes_suspect_and_movement_clears_it() -> None:
    one = rail()
    up(one, 0)
    assert not one.happens("MOVES", 1)
    assert one.happens("IS_QUIET", 1)
    assert not one.happens("IS_QUIET", 2)
    assert one.happens("MOVES", 3)
    assert state(one) == "UP"
    assert one.happens("IS_QUIET", 4)
    assert one.happens("FAILS", 5)
    assert one.row["has_carried"]


@pytest.mark.parametrize("before", ["BUILDING", "PROBED"])
def test_an_attempt_and_a_probe_have_deadlines(before: str) -> None:
    one = rail()
    one.happens("IS_DUE", 0)
    if before == "PROBED":
        one.happens("IS_BUILT", 0)
    assert state(one) == before
    assert due(one) == S
    assert one.happens(one.late(), S)
    assert state(one) == ("DOWN" if before == "BUILDING" else "UNSETTLED")
    assert not one.row["has_carried"]


def test_a_queue_pair_that_comes_too_late_has_no_place() -> None:
    one = rail()
    one.happens("IS_DUE", 0)
    one.happens("IS_LATE", due(one))
    assert not one.happens("IS_BUILT", 2 * S)
    one.happens("IS_DUE", due(one))
    assert one.row["epoch"] == 2


def test_each_attempt_of_a_rail_that_never_worked_goes_another_way() -> None:
    one = rail(ways=3)
    ways = []
    for now in range(4):
        one.happens("IS_DUE", now)
        ways.append(one.row["way"])
        one.happens("NOT_MADE", now)
    assert ways == [0, 1, 2, 0]
    up(one, 5)
    assert one.row["way"] == 1
    one.happens("FAILS", 6)
    one.happens("IS_CLOSED", 6)
    one.happens("IS_DUE", 7)
    assert one.row["way"] == 1, "this way has worked"


@given(st.integers(0, 2**64 - 1), st.integers(1, 40))
def test_back_off_doubles_with_jitter_up_to_its_maximum(seed: int, failures: int) -> None:
    one = down(100 * MS, failures, seed)
    full = min(BACKOFF_NS * 2 ** (failures - 1), BACKOFF_MAX_NS)
    assert full // 2 <= due(one) - 100 * MS <= full


def test_jitter_differs_between_rails_and_is_repeated_by_the_seed() -> None:
    first, other, again = (due(down(seed=seed)) for seed in (1, 2, 1))
    assert first == again != other


def test_the_link_coming_back_ends_a_long_back_off() -> None:
    one = down(50 * S, failures=10)
    assert due(one) - 50 * S >= BACKOFF_MAX_NS // 2
    one.hurry(50 * S + 1)
    assert due(one) <= 50 * S + 1 + BACKOFF_NS
    assert (state(one), one.row["failures"]) == ("DOWN", 1)


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_steady_rail_has_its_failures_forgiven(is_suspect: bool) -> None:
    one = down(failures=6)
    up(one, 10 * S)
    if is_suspect:
        one.happens("IS_QUIET", 10 * S + STEADY_NS - 1)
    one.happens("FAILS", 10 * S + STEADY_NS)
    one.happens("IS_CLOSED", 10 * S + STEADY_NS)
    assert one.row["failures"] == 1


def test_a_flapping_rail_does_not() -> None:
    one = down(failures=6)
    up(one, 10 * S)
    one.happens("FAILS", 10 * S + 1)
    one.happens("IS_CLOSED", 10 * S + 1)
    assert one.row["failures"] == 7


def test_back_in_use_within_five_seconds_of_its_return() -> None:
    """However long it was away, with every attempt refused until then."""
    one, returned = down(), 60 * S
    now = 0
    while state(one) != "UP":
        now = max(due(one), now)
        if state(one) == "DOWN":
            one.happens("IS_DUE", now)
        elif now < returned:
            one.happens("IS_LATE", now)  # nobody answers
        else:
            one.happens("IS_BUILT" if state(one) == "BUILDING" else "ANSWERS", now)
    assert now - returned < 5 * S


def test_the_states_of_the_table_are_those_of_python() -> None:
    assert [f"RAIL_{name}" for name in STATES] == [one.name for one in RailState]


def test_no_state_is_a_dead_end_and_work_goes_only_where_a_probe_went() -> None:
    assert all(TABLE.values())
    into_up = {(s, h) for s, row in TABLE.items() for h, after in row.items() if after == "UP"}
    at_source = {one for one in into_up if one[1] != "IS_TAKEN"}
    assert at_source == {("SUSPECT", "MOVES"), ("PROBED", "ANSWERS")}
    for name in ("PROBED", "UP", "SUSPECT"):
        assert TABLE[name]["FAILS"] == "UNSETTLED"
    assert set(TABLE["UNSETTLED"]) == {"IS_TAKEN", "IS_CLOSED"}, "it is not made anew before that"


class Owner(RuleBasedStateMachine):
    """Any happenings in any order, beside those who make queue pairs: each makes one for the epoch
    that it was asked for, and may be as late as it likes. What the owner does with one that comes
    is the rule of `is_awaited` in _core.pyx."""

    def __init__(self) -> None:
        super().__init__()
        self.rail = rail(ways=2, seed=11)
        self.now = 0
        #: Epochs of attempts under way, also of those that are too late.
        self.attempts: list[int] = []
        #: Of the queue pair at this side.
        self.pair: int | None = None
        self.newest = 0

    def step(self, name: str) -> bool:
        before: dict[str, Any] = self.rail.row
        changed = self.rail.happens(name, self.now)
        row = self.rail.row
        assert changed == (name in TABLE[before["state"]])
        assert row["state"] == TABLE[before["state"]].get(name, before["state"])
        built = changed and row["state"] == "BUILDING"
        assert row["epoch"] == before["epoch"] + built
        if built:
            self.attempts.append(row["epoch"])
        return changed

    @rule(step_ns=st.integers(1, 3 * S))
    def time_passes(self, step_ns: int) -> None:
        self.now += step_ns
        due_ns = self.rail.due_ns
        if due_ns is not None and due_ns <= self.now:
            name = self.rail.late()
            assert self.step(name), "what is due moves on, else its worker would turn for ever"
            if name == "FAILS":
                self.pair = None

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), is_made=st.booleans())
    def an_attempt_ends(self, data: st.DataObject, is_made: bool) -> None:
        epoch = self.attempts.pop(data.draw(st.integers(0, len(self.attempts) - 1)))
        is_awaited = self.rail.row["state"] == "BUILDING" and self.rail.row["epoch"] == epoch
        if is_awaited and is_made:
            assert self.pair is None, "there is one at most"
            assert self.step("IS_BUILT")
            assert epoch > self.newest, "no late one replaces a newer one"
            self.pair = self.newest = epoch
        elif is_awaited:
            assert self.step("NOT_MADE")

    @rule(name=st.sampled_from(["ANSWERS", "IS_QUIET", "MOVES"]))
    def a_completion_comes_or_does_not(self, name: str) -> None:
        if self.pair is not None:
            self.step(name)

    @rule()
    def it_dies(self) -> None:
        if self.pair is not None:
            assert self.step("FAILS")
            self.pair = None

    @rule()
    def the_destination_closes_its_end(self) -> None:
        if state(self.rail) == "UNSETTLED":
            assert self.step("IS_CLOSED")

    @rule()
    def the_link_comes_back(self) -> None:
        before = self.rail.due_ns
        self.rail.hurry(self.now)
        if state(self.rail) == "DOWN":
            assert before is not None
            assert due(self.rail) <= min(before, self.now + BACKOFF_NS)

    @invariant()
    def it_has_a_queue_pair_where_its_state_says_so(self) -> None:
        assert (self.pair is not None) == (state(self.rail) in ("PROBED", "UP", "SUSPECT"))

    @invariant()
    def whatever_waits_for_this_side_has_a_deadline(self) -> None:
        waits = state(self.rail) in ("DOWN", "BUILDING", "PROBED")
        assert waits == (self.rail.due_ns is not None)


TestOwner = pytest.mark.slow(Owner.TestCase)
