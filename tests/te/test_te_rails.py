# SPDX-License-Identifier: Apache-2.0
"""The life of a rail, with a fake clock: what it may do, and that it always comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from te.rails import TRANSITIONS, Event, Instruction, Rail, State, Timing, usable

TIMING = Timing()
BY_CLOCK = (Event.QUIET, Event.STUCK, Event.DUE)


def down(now_s: float = 0.0, failures: int = 1) -> Rail:
    """A rail that failed so many times, the last time at ``now_s``."""
    rail = Rail(7, 0.0)
    rail.handle(Event.BROKEN, now_s)
    for _ in range(failures - 1):
        rail.tick(rail.due_s)
        rail.handle(Event.REFUSED, now_s)
    assert rail.failures == failures
    return rail


def test_an_error_breaks_replans_and_leads_back_over_a_probe() -> None:
    rail = Rail(1, 0.0)
    told = rail.handle(Event.BROKEN, 5.0, 0, "RETRY_EXC_ERR")
    assert told == (Instruction.HOLD, Instruction.BREAK, Instruction.REPLAN)
    assert (rail.state, rail.reason) == (State.DOWN, "RETRY_EXC_ERR")
    assert rail.tick(rail.due_s - 1e-6) == ()
    assert rail.tick(rail.due_s) == (Instruction.BUILD,)
    assert rail.generation == 1
    assert rail.handle(Event.BUILT, 5.2, 1) == (Instruction.PROBE,)
    assert rail.handle(Event.ANSWERED, 5.3, 1) == (Instruction.USE,)
    assert rail.state is State.UP


def test_silence_makes_suspect_then_down_and_movement_clears_it() -> None:
    rail = Rail(1, 0.0)
    assert rail.tick(0.05, 0.0) == ()
    assert rail.tick(0.15, 0.0) == (Instruction.HOLD,)
    assert rail.tick(0.20, 0.0) == ()
    assert rail.tick(0.25, 0.24) == (Instruction.USE,)
    assert rail.tick(0.40, 0.24) == (Instruction.HOLD,)
    assert Instruction.REPLAN in rail.tick(1.24, 0.24)
    assert rail.reason == "no completion for 1.00 s"


def test_a_rail_without_work_is_never_suspected() -> None:
    rail = Rail(1, 0.0)
    assert rail.tick(1000.0) == ()
    assert rail.state is State.UP


def test_a_slow_rail_has_the_time_its_work_takes() -> None:
    rail = Rail(1, 0.0)
    assert rail.tick(3.0, 0.0, backlog_s=3.0) == ()
    assert rail.tick(3.2, 0.0, backlog_s=3.0) == (Instruction.HOLD,)


def test_news_of_a_former_queue_pair_is_ignored() -> None:
    rail = down()
    rail.tick(rail.due_s)
    assert rail.generation == 1
    for event in Event:
        if event not in (Event.BUILT, Event.REFUSED):
            assert rail.handle(event, 1.0, 0) == ()
    assert rail.state is State.REBUILD


@pytest.mark.parametrize("state", [State.REBUILD, State.PROBE])
def test_rebuild_and_probe_have_deadlines(state: State) -> None:
    rail = down()
    rail.tick(rail.due_s)
    if state is State.PROBE:
        rail.handle(Event.BUILT, rail.since_s)
    assert rail.tick(rail.due_s - 1e-6) == ()
    assert rail.tick(rail.due_s) == (Instruction.BREAK,)
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


def test_a_steady_rail_has_its_failures_forgiven() -> None:
    rail = down(failures=6)
    rail.tick(rail.due_s)
    rail.handle(Event.BUILT, 10.0)
    rail.handle(Event.ANSWERED, 10.0)
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


def test_every_state_is_left_by_a_deadline_or_by_work() -> None:
    """No state of the table is a dead end, and work never goes where no probe went."""
    for state in State:
        assert any(before is state for before, _ in TRANSITIONS)
    into_up = {before for (before, _), (after, _) in TRANSITIONS.items() if after is State.UP}
    assert into_up == {State.SUSPECT, State.PROBE}
    for (before, _), (after, told) in TRANSITIONS.items():
        assert (Instruction.REPLAN in told) == (
            after is State.DOWN and before in (State.UP, State.SUSPECT)
        )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([State.UP, State.SUSPECT, State.UP], (0, 2)),
        ([State.DOWN, State.SUSPECT, State.PROBE], (1,)),
        ([State.DOWN, State.REBUILD], ()),
        ([], ()),
    ],
)
def test_usable(states: list[State], expected: tuple[int, ...]) -> None:
    assert usable(states) == expected


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"backoff_s": 0.0}, "backoff_s=0.0 must be a positive"),
        ({"probe_timeout_s": float("inf")}, "probe_timeout_s=inf"),
        ({"suspect_after_s": 2.0}, "suspect_after_s=2.0 must not be above down_after_s=1.0"),
    ],
)
def test_bad_timing_is_named(values: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Timing(**values)


class Life(RuleBasedStateMachine):
    """Any events in any order: what is told is always something that can be done."""

    def __init__(self) -> None:
        super().__init__()
        self.rail = Rail(11, 0.0)
        self.now_s = 0.0
        self.held = False
        self.has_queue_pair = True
        self.is_building = False

    def obey(self, told: tuple[Instruction, ...]) -> None:
        for instruction in told:
            match instruction:
                case Instruction.HOLD:
                    self.held = True
                case Instruction.USE:
                    assert self.has_queue_pair
                    self.held = False
                case Instruction.BREAK:
                    self.has_queue_pair = self.is_building = False
                case Instruction.REPLAN:
                    assert not self.has_queue_pair
                case Instruction.BUILD:
                    assert not self.has_queue_pair
                    assert not self.is_building
                    self.is_building = True
                case Instruction.PROBE:
                    assert self.is_building
                    self.is_building = False
                    self.has_queue_pair = True

    @rule(
        event=st.sampled_from([event for event in Event if event not in BY_CLOCK]),
        behind=st.integers(0, 1),
    )
    def something_happens(self, event: Event, behind: int) -> None:
        generation = self.rail.generation - behind
        self.obey(self.rail.handle(event, self.now_s, generation))

    @rule(step_s=st.floats(0.001, 3.0), silent=st.booleans())
    def time_passes(self, step_s: float, silent: bool) -> None:
        before_s = self.now_s
        self.now_s += step_s
        waits = silent and self.rail.state in (State.UP, State.SUSPECT)
        self.obey(self.rail.tick(self.now_s, before_s if waits else None))

    @invariant()
    def work_goes_where_a_queue_pair_is(self) -> None:
        if self.rail.state in (State.UP, State.SUSPECT):
            assert self.has_queue_pair
        assert self.held == (self.rail.state is not State.UP)

    @invariant()
    def it_is_always_due_when_it_is_not_in_use(self) -> None:
        idle = self.rail.state in (State.UP, State.SUSPECT)
        longest_s = max(TIMING.backoff_max_s, TIMING.rebuild_timeout_s, TIMING.probe_timeout_s)
        assert idle or self.rail.due_s <= self.now_s + longest_s


test_life = Life.TestCase
