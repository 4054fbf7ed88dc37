# SPDX-License-Identifier: Apache-2.0
"""Connections that bring nothing are found; a loop that stood still itself finds none."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from test_links import Bench, bench, context

from sglang_mooncake.context import Deadlines
from sglang_mooncake.links.silence import Silence
from sglang_mooncake.rooms.decode_events import LinkDown

__all__ = ["bench", "context"]

DEADLINES = Deadlines(heartbeat_s=0.5, heartbeat_failures_max=4)
AFTER_S = 2.0


def looks(silence: Silence[str], counts: dict[str, int], begin_s: float) -> tuple[list[str], float]:
    """Looks every quarter of a second until something is silent: what, and when."""
    for turn in itertools.count(1):
        now_s = begin_s + turn / 4
        if found := silence.look(counts, now_s):
            return found, now_s
    raise AssertionError


def test_what_brings_nothing_for_so_long_is_silent() -> None:
    silence: Silence[str] = Silence(DEADLINES)
    assert silence.look({"a": 1, "b": 1}, 10.0) == []
    for turn in range(1, 8):
        assert silence.look({"a": 1, "b": 1 + turn}, 10.0 + turn / 4) == []
    assert silence.look({"a": 1, "b": 8}, 10.0 + AFTER_S) == ["a"]


@given(
    steps=st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 2)), max_size=60),
)
def test_time_in_which_nobody_looked_counts_as_one_heartbeat(
    steps: list[tuple[float, int]],
) -> None:
    """However long the pauses are: silent is what brought nothing in four looks at the least."""
    silence: Silence[str] = Silence(DEADLINES)
    now_s, count, quiet = 1.0, 0, 0
    silence.look({"a": 0}, now_s)
    for pause_s, brought in steps:
        now_s, count = now_s + pause_s, count + brought
        quiet = 0 if brought else quiet + 1
        found = silence.look({"a": count}, now_s)
        if quiet < DEADLINES.heartbeat_failures_max:
            assert found == []


def test_after_a_pause_the_silence_goes_on_from_where_it_was() -> None:
    silence: Silence[str] = Silence(DEADLINES)
    silence.look({"a": 1}, 5.0)
    assert silence.look({"a": 1}, 3600.0) == []
    found, when_s = looks(silence, {"a": 1}, 3600.0)
    assert found == ["a"]
    assert when_s == 3600.0 + AFTER_S - DEADLINES.heartbeat_s


def test_others_are_forgotten() -> None:
    silence: Silence[str] = Silence(DEADLINES)
    silence.look({"a": 1}, 1.0)
    silence.look({}, 1.25)
    for turn in range(7):
        assert silence.look({"a": 1}, 1.5 + turn / 4) == []
    assert silence.look({"a": 1}, 1.5 + AFTER_S) == ["a"]


def test_a_link_is_given_up_that_brings_nothing_and_none_after_a_pause(bench: Bench) -> None:
    bench.connected()
    bench.links._silence = Silence(DEADLINES)
    bench.links.tick(now_s := 1.0)
    bench.links.tick(now_s := now_s + 1000 * AFTER_S)
    assert not bench.events, "the process stood still"
    while not bench.events:  # libzmq may say something now and then
        bench.links.tick(now_s := now_s + DEADLINES.heartbeat_s / 2)
    (event,) = bench.events
    assert isinstance(event, LinkDown)
    assert event.reason == (
        f"lost the connection to {bench.key}, which has brought nothing for {AFTER_S:g} s"
    )
    assert not bench.links.stands(bench.key)
