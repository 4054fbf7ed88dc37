# SPDX-License-Identifier: Apache-2.0
"""What counts as silence of a peer, with a fake clock: only time in which this side looked."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_compiled import function

pytestmark = pytest.mark.pure

_U64 = ctypes.c_uint64
_lasts = function("te.core.worker", "silence_lasts", _U64, ctypes.c_void_p, _U64, _U64, _U64)
_ends_soon = function(
    "te.core.worker", "silence_ends_soon", ctypes.c_int, ctypes.c_void_p, _U64, _U64
)
_counts_most = function("te.core.worker", "counts_most_ns", _U64, _U64, _U64)
MOST = 20


class Silence:
    """The struct of worker.pxd, and who checks it."""

    def __init__(self) -> None:
        self._kept = (_U64 * 3)()

    def check(self, now: int, moved: int, most: int = MOST) -> int:
        return int(_lasts(ctypes.byref(self._kept), moved, now, most))

    def ends_soon(self, limit: int, most: int) -> bool:
        return bool(_ends_soon(ctypes.byref(self._kept), limit, most))


def test_it_lasts_from_the_check_that_saw_it_first() -> None:
    one = Silence()
    assert [one.check(now, 95) for now in (100, 110, 120)] == [0, 10, 20]


def test_movement_and_nothing_to_wait_for_end_it() -> None:
    one = Silence()
    assert [one.check(100, 95), one.check(110, 95), one.check(120, 115)] == [0, 10, 0]
    assert [one.check(130, 115), one.check(140, 0), one.check(150, 0)] == [10, 0, 0]
    assert [one.check(160, 115), one.check(170, 115)] == [0, 10]


def test_time_without_a_check_does_not_count() -> None:
    one = Silence()
    assert [one.check(100, 95), one.check(10_000, 95), one.check(10_010, 95)] == [
        0,
        MOST,
        MOST + 10,
    ]


@given(st.integers(1, 50), st.integers(0, 2_000))
def test_a_few_checks_make_a_stall_however_seldom_a_process_runs(check: int, gap: int) -> None:
    """A freeze alone makes none."""
    stall = 200
    one, most = Silence(), int(_counts_most(check, stall))
    lasted = [one.check(1 + n * (stall + gap), 1, most) for n in range(6)]
    assert lasted[1] < stall < lasted[5]


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), min_size=1))
def test_it_never_lasts_longer_than_the_time_that_was_looked_at(steps: Any) -> None:
    """The model: each gap between two checks without movement, as far as it counts."""
    one, now, moved, expected = Silence(), 1, 1, 0
    one.check(now, moved)
    for gap, moves in steps:
        now += gap
        moved += moves
        expected = 0 if moves else expected + min(gap, MOST)
        assert one.check(now, moved) == expected


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(1, 2_000), st.booleans()), min_size=8),
    st.booleans(),
)
def test_a_rail_goes_before_its_link_where_both_have_the_same_time_out(
    check: int, rounds: list[tuple[int, bool]], is_late: bool
) -> None:
    """However the worker was held up, in whichever order it checks them, and though the rail moved
    after the check that saw the link move: when the link is found stalled, the rail ends soon."""
    limit = 400
    link, rail, most = Silence(), Silence(), int(_counts_most(check, limit))
    now, is_suspect = 1, False
    for turn, (gap, is_first) in enumerate(rounds * 8):
        now += gap
        moved = 1 if turn or not is_late else 0
        if is_first:
            rail.check(now, moved, most)
        was_suspect, is_suspect = is_suspect, link.check(now, 1, most) > limit
        if was_suspect and is_suspect:
            assert rail.ends_soon(limit, most)
            return
        if not is_first:
            rail.check(now, moved, most)


def test_a_rail_that_moved_a_while_ago_does_not_end_soon() -> None:
    rail, limit, check = Silence(), 400, 10
    most = int(_counts_most(check, limit))
    found = []
    for turn in range(limit // check):
        rail.check(1 + turn * check, 1, most)
        found.append(rail.ends_soon(limit, most))
    assert found.index(True) == (limit - most) // check + 1
    assert all(found[found.index(True) :])


def test_a_silence_that_has_not_begun_does_not_end_soon_however_short_the_limit() -> None:
    one = Silence()
    one.check(100, 95)
    assert not one.ends_soon(MOST // 2, MOST)
    one.check(110, 95)
    assert one.ends_soon(MOST // 2, MOST)
