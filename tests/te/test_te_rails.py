# SPDX-License-Identifier: Apache-2.0
"""The life of a rail, with a fake clock: what it may do, and that it always comes back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from te.transports.rdma.rails import TRANSITIONS, Event, Rail, State, Timing

pytestmark = pytest.mark.pure

TIMING = Timing()
BY_CLOCK = (Event.STUCK, Event.DUE)


def down(now_s: float = 0.0, failures: int = 1) -> Rail:
    """A rail that failed so many times, the last time at ``now_s``."""
    rail = Rail(7, 0.0)
    rail.handle(Event.BROKEN, now_s)
    for _ in range(failures - 1):
        rail.tick(rail.due_s)
        rail.handle(Event.REFUSED, now_s)
    assert rail.failures == failures
    return rail


def test_an_error_leads_back_over_a_new_queue_pair_and_a_probe() -> None:
    rail = Rail(1, 0.0)
    assert rail.handle(Event.BROKEN, 5.0, 0, "RETRY_EXC_ERR")
    assert (rail.state, rail.reason) == (State.DOWN, "RETRY_EXC_ERR")
    assert not rail.tick(rail.due_s - 1e-6)
    assert rail.tick(rail.due_s)
    assert (rail.state, rail.generation) == (State.REBUILD, 1)
    assert rail.handle(Event.BUILT, 5.2, 1)
    assert rail.state is State.PROBE
    assert rail.handle(Event.ANSWERED, 5.3, 1)
    assert rail.state is State.UP


def test_quiet_makes_suspect_and_movement_clears_it() -> None:
    rail = Rail(1, 0.0)
    assert rail.handle(Event.QUIET, 1.0)
    assert rail.state is State.SUSPECT
    assert not rail.handle(Event.QUIET, 1.1)
    assert rail.handle(Event.MOVED, 1.2)
    assert (rail.state, rail.reason) == (State.UP, "")
    assert rail.handle(Event.QUIET, 2.0)
    assert rail.handle(Event.BROKEN, 3.0, reason="no completion for 2 s")
    assert (rail.state, rail.reason) == (State.DOWN, "no completion for 2 s")


@pytest.mark.parametrize("event", [None, Event.QUIET])
def test_a_rail_that_carries_has_nothing_to_do_by_the_clock(event: Event | None) -> None:
    rail = Rail(1, 0.0)
    if event is not None:
        rail.handle(event, 0.0)
    before = rail.state
    assert not rail.tick(1000.0)
    assert rail.state is before


def test_news_of_a_former_queue_pair_is_ignored() -> None:
    rail = down()
    rail.tick(rail.due_s)
    assert rail.generation == 1
    for event in Event:
        if event not in (Event.BUILT, Event.REFUSED):
            assert not rail.handle(event, 1.0, 0)
    assert rail.state is State.REBUILD


@pytest.mark.parametrize("state", [State.REBUILD, State.PROBE])
def test_rebuild_and_probe_have_deadlines(state: State) -> None:
    rail = down()
    rail.tick(rail.due_s)
    if state is State.PROBE:
        rail.handle(Event.BUILT, rail.since_s)
    assert not rail.tick(rail.due_s - 1e-6)
    assert rail.tick(rail.due_s)
    assert rail.state is State.DOWN
    assert "within 1 s" in rail.reason


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_back_off_doubles_with_jitter_up_to_its_maximum(seed: int, failures: int) -> None:
    rail = Rail(seed, 0.0)
    rail.handle(Event.BROKEN, 100.0)
    for _ in range(failures - 1):
        rail.tick(rail.due_s)
        rail.handle(Event.REFUSED, 100.0)
    delay_s = rail.due_s - 100.0
    full_s = min(TIMING.backoff_s * 2 ** (failures - 1), TIMING.backoff_max_s)
    assert full_s / 2 <= delay_s <= full_s + 1e-9


def test_jitter_differs_between_rails_and_is_repeated_by_the_seed() -> None:
    delays = [Rail(seed, 0.0) for seed in (1, 2, 1)]
    for rail in delays:
        rail.handle(Event.BROKEN, 0.0)
    assert delays[0].due_s == delays[2].due_s != delays[1].due_s


def test_the_link_coming_back_ends_a_long_back_off() -> None:
    rail = down(now_s=50.0, failures=10)
    assert rail.due_s - 50.0 >= TIMING.backoff_max_s / 2
    rail.handle(Event.LINK_UP, 50.1)
    assert rail.due_s <= 50.1 + TIMING.backoff_s
    assert rail.state is State.DOWN


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_steady_rail_has_its_failures_forgiven(is_suspect: bool) -> None:
    rail = down(failures=6)
    rail.tick(rail.due_s)
    rail.handle(Event.BUILT, 10.0)
    rail.handle(Event.ANSWERED, 10.0)
    if is_suspect:
        rail.handle(Event.QUIET, 9.9 + TIMING.steady_s)
    rail.handle(Event.BROKEN, 10.0 + TIMING.steady_s)
    assert rail.failures == 1


def test_a_flapping_rail_does_not() -> None:
    rail = down(failures=6)
    rail.tick(rail.due_s)
    rail.handle(Event.BUILT, 10.0)
    rail.handle(Event.ANSWERED, 10.0)
    rail.handle(Event.BROKEN, 10.1)
    assert rail.failures == 7


def test_back_in_use_within_five_seconds_of_its_return() -> None:
    """However long it was away, with every build refused until then."""
    rail, returned_s = Rail(3, 0.0), 60.0
    rail.handle(Event.BROKEN, 0.0)
    now_s = 0.0
    while rail.state is not State.UP:
        now_s = max(rail.due_s, now_s)
        if rail.state is State.DOWN:
            rail.tick(now_s)
        elif now_s < returned_s:
            rail.tick(now_s)  # nobody answers: the deadline of the rebuild
        elif rail.state is State.REBUILD:
            rail.handle(Event.BUILT, now_s)
        else:
            rail.handle(Event.ANSWERED, now_s)
    assert now_s - returned_s < 5.0


def test_no_state_is_a_dead_end_and_work_goes_only_where_a_probe_went() -> None:
    for state in State:
        assert any(before is state for before, _ in TRANSITIONS)
    into_up = {key for key, after in TRANSITIONS.items() if after is State.UP}
    assert into_up == {(State.SUSPECT, Event.MOVED), (State.PROBE, Event.ANSWERED)}
    into_suspect = {before for (before, _), after in TRANSITIONS.items() if after is State.SUSPECT}
    assert into_suspect == {State.UP}
    for state in State:
        if state is not State.DOWN:
            assert TRANSITIONS[state, Event.BROKEN] is State.DOWN


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"backoff_s": 0.0}, "backoff_s=0.0 must be a positive"),
        ({"probe_timeout_s": float("inf")}, "probe_timeout_s=inf"),
        ({"backoff_s": 2.0}, "backoff_s=2.0 must not be above backoff_max_s=1.0"),
    ],
)
def test_bad_timing_is_named(values: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Timing(**values)


class Life(RuleBasedStateMachine):
    """Any events in any order, beside a queue pair that is made, probed and broken."""

    def __init__(self) -> None:
        super().__init__()
        self.rail = Rail(11, 0.0)
        self.now_s = 0.0

    def follow(self, before: State, changed: bool, number: int) -> None:
        """What may have become of it."""
        assert changed == (self.rail.state is not before)
        if changed:
            assert self.rail.since_s == self.now_s
            assert self.rail.state in {
                after for (state, _), after in TRANSITIONS.items() if state is before
            }
        built = changed and self.rail.state is State.REBUILD
        assert self.rail.generation == number + built

    @rule(
        event=st.sampled_from([event for event in Event if event not in BY_CLOCK]),
        behind=st.integers(0, 1),
    )
    def something_happens(self, event: Event, behind: int) -> None:
        before, number = self.rail.state, self.rail.generation
        changed = self.rail.handle(event, self.now_s, number - behind)
        assert not (changed and behind)
        self.follow(before, changed, number)

    @rule(step_s=st.floats(0.001, 3.0))
    def time_passes(self, step_s: float) -> None:
        self.now_s += step_s
        before, number = self.rail.state, self.rail.generation
        is_due = self.rail.due_s <= self.now_s
        changed = self.rail.tick(self.now_s)
        assert changed == is_due
        self.follow(before, changed, number)

    @rule()
    def the_link_comes_back(self) -> None:
        before_s = self.rail.due_s
        self.rail.handle(Event.LINK_UP, self.now_s)
        assert self.rail.due_s <= before_s
        if self.rail.state is State.DOWN:
            assert self.rail.due_s <= self.now_s + TIMING.backoff_s

    @invariant()
    def whatever_waits_has_a_deadline(self) -> None:
        carries = self.rail.state in (State.UP, State.SUSPECT)
        assert carries == math.isinf(self.rail.due_s)

    @invariant()
    def a_rail_that_failed_has_a_reason(self) -> None:
        assert bool(self.rail.reason) == (self.rail.failures > 0 or self.rail.generation > 0)


TestLife = pytest.mark.slow(Life.TestCase)
