# SPDX-License-Identifier: Apache-2.0
"""Which rail carries the next piece: all end about together, and none that is slow ends last."""

from __future__ import annotations

import ctypes
import functools
import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_compiled import function

pytestmark = pytest.mark.pure

MIB = float(1 << 20)
DEPTH = 8 * MIB
RATES = st.floats(1e6, 50e9)
LANES = st.lists(
    st.tuples(RATES | st.just(0.0), st.floats(0, 1e9), st.booleans()), min_size=1, max_size=16
)


NO_LANE = 0xFFFFFFFF

_function = functools.partial(function, "te.transports.rdma.balance")
_P, _U32, _DOUBLE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_double
_choose = _function("choose", _U32, _P, _U32, _DOUBLE, _DOUBLE, _U32)
_slowness = _function("slowness", _DOUBLE, ctypes.c_uint8)
_begin = _function("pace_begin", None, _P, _DOUBLE)
_retry = _function("pace_retry", None, _P, _DOUBLE)
_note = _function("pace_note", None, _P, _DOUBLE, _DOUBLE)
_rate = _function("pace_rate", _DOUBLE, _P)
_speeds_of = _function("speeds_of", _DOUBLE, _P, _P, _U32)


class Lane(ctypes.Structure):
    _fields_ = (("speed", _DOUBLE), ("in_flight", _DOUBLE), ("has_room", ctypes.c_int))


class Pace(ctypes.Structure):
    _fields_ = (("nbytes", _DOUBLE), ("busy_s", _DOUBLE))


def choose(
    lanes: list[tuple[float, float, bool]], nbytes: float, waiting: float, turn: int
) -> int | None:
    """Which lane takes a piece, None if it is to wait. Of each lane its speed in bytes per second,
    its bytes in flight and whether it has room."""
    found = int(_choose((Lane * len(lanes))(*lanes), len(lanes), nbytes, waiting, turn))
    return None if found == NO_LANE else found


def rate_after(
    bytes_per_s: float, measurements: list[tuple[float, float]], is_retried: bool = False
) -> float:
    """The rate of a rail by a port of that speed, after bytes were moved in so many seconds; or of
    one that was slow, and is tried again as if it had that rate."""
    pace = Pace()
    (_retry if is_retried else _begin)(ctypes.byref(pace), bytes_per_s)
    for nbytes, busy_s in measurements:
        _note(ctypes.byref(pace), nbytes, busy_s)
    return float(_rate(ctypes.byref(pace)))


def speeds(rates: list[float]) -> list[float]:
    """What the balancer reckons with where those rates were measured."""
    found = (_DOUBLE * len(rates))(*rates)
    _speeds_of(found, found, len(rates))
    return list(found)


def ends(lanes: list[tuple[float, float, bool]], nbytes: float) -> list[float | None]:
    return [(flying + nbytes) / speed if speed else None for speed, flying, _ in lanes]


@pytest.mark.slow
@given(LANES, st.floats(1, 1e7), st.floats(0, 1e10), st.integers(0, 1000))
def test_the_rail_that_is_done_first_takes_it(
    lanes: list[tuple[float, float, bool]], nbytes: float, more: float, turn: int
) -> None:
    found = choose(lanes, nbytes, nbytes + more, turn)
    when = ends(lanes, nbytes)
    free = [i for i, lane in enumerate(lanes) if lane[0] and lane[2]]
    soonest = min((one for one in when if one is not None), default=None)
    if found is None:
        full = [i for i, lane in enumerate(lanes) if lane[0] and not lane[2]]
        assert not free or any(when[i] == soonest for i in full)
    else:
        assert found in free
        assert when[found] == min(when[i] for i in free)  # type: ignore[type-var]


@given(st.integers(2, 8), st.integers(0, 1000))
def test_idle_equals_take_turns(count: int, turn: int) -> None:
    lanes = [(1e9, 0.0, True)] * count
    assert choose(lanes, 1, 1, turn) == turn % count


def test_without_a_rail_that_has_room_or_may_carry_it_the_piece_waits() -> None:
    assert choose([(1e9, 0.0, False), (0.0, 0.0, True)], 1, 1e12, 0) is None


def test_a_slow_rail_helps_a_full_one_while_enough_waits() -> None:
    lanes = [(16e9, DEPTH, False), (1e9, 0.0, True)]
    assert choose(lanes, MIB, 100 * MIB, 0) == 1
    assert choose(lanes, MIB, 9 * MIB, 0) == 1
    assert choose(lanes, MIB, 8 * MIB, 0) is None


def carry(rates: list[float], believed: list[float], pieces: int) -> list[float]:
    """Carries pieces of 1 MiB by rails of these true rates; when each rail was done."""
    flying, done_s = [0.0] * len(rates), [0.0] * len(rates)
    now_s, left, turn = 0.0, pieces, 0
    coming: list[tuple[float, int]] = []
    while left or coming:
        while left:
            lanes = [
                (speed, load, load < DEPTH) for speed, load in zip(believed, flying, strict=True)
            ]
            i = choose(lanes, MIB, left * MIB, turn)
            if i is None:
                break
            left, turn = left - 1, i + 1
            flying[i] += MIB
            done_s[i] = max(done_s[i], now_s) + MIB / rates[i]
            heapq.heappush(coming, (done_s[i], i))
        assert coming, "nothing is under way, and something waits"
        now_s, i = heapq.heappop(coming)
        flying[i] -= MIB
    return done_s


@given(st.lists(RATES, min_size=1, max_size=8), st.integers(1, 300))
def test_a_transfer_ends_about_when_it_could(rates: list[float], pieces: int) -> None:
    """With rates as they are: no later than what could be reached and one piece more on a rail that
    is worth it. None counts as slower than a sixteenth of the fastest."""
    true = [max(rate, max(rates) / 16) for rate in rates]
    ideal_s = pieces * MIB / sum(true)
    assert max(carry(true, true, pieces)) <= ideal_s + MIB / max(true) * 2 + 1e-9 * ideal_s + (
        MIB * len(true) / sum(true)
    )


@pytest.mark.slow
@given(st.lists(st.floats(1e9, 3e9), min_size=2, max_size=8), st.integers(100, 300))
def test_rails_that_are_slower_than_believed_get_less(rates: list[float], pieces: int) -> None:
    """What they have under way tells; what is too much for them is one queue of theirs."""
    done_s = carry(rates, [max(rates)] * len(rates), pieces)
    assert max(done_s) <= pieces * MIB / sum(rates) + (DEPTH + MIB) / min(rates)


def test_far_rails_are_slower() -> None:
    assert [_slowness(distance) for distance in (0, 1, 2, 255)] == [1, 4, 16, 16]


@given(st.lists(st.tuples(RATES, st.floats(1e-6, 10)), max_size=20), RATES)
def test_a_measured_rate_lies_between_what_was_seen(
    seen: list[tuple[float, float]], port: float
) -> None:
    measurements = [(rate * busy_s, busy_s) for rate, busy_s in seen]
    for count in range(len(seen)):
        rate, busy_s = seen[count]
        before = rate_after(port, measurements[:count])
        after = rate_after(port, measurements[: count + 1])
        # Never away from what was seen last, and never farther than anything ever seen.
        assert abs(after - rate) <= abs(before - rate) * 1.001 + 1 / busy_s
        low = min(port, *(one for one, _ in seen[: count + 1]))
        high = max(port, *(one for one, _ in seen[: count + 1]))
        assert low * 0.999 <= after <= high * 1.001 + 1 / busy_s


@given(RATES)
def test_no_time_changes_no_rate(rate: float) -> None:
    assert rate_after(rate, [(1e9, 0.0)]) == pytest.approx(rate)


@given(st.floats(0.01, 10))
def test_a_rail_that_moved_nothing_still_has_a_rate(busy_s: float) -> None:
    assert rate_after(1e9, [(0.0, busy_s)] * 1000) > 0


def test_a_measured_rate_follows_in_seconds() -> None:
    assert rate_after(1e9, [(1e9, 1.0)] + [(2e6, 0.1)] * 50) == pytest.approx(2e7, rel=0.02)


def test_a_rail_that_is_tried_again_is_judged_by_more_than_a_piece_and_soon() -> None:
    piece, fast = 1e6, 1e9
    assert rate_after(fast, [(piece, 7e-3)], is_retried=True) > fast / 3
    assert rate_after(fast, [(piece, 1e-2)] * 7, is_retried=True) < fast / 3


def test_the_speed_of_a_port_holds_until_enough_was_measured() -> None:
    assert rate_after(1e9, [(1e6, 0.01)]) == pytest.approx(1e9, rel=0.05)


@given(st.lists(RATES, min_size=1, max_size=16))
def test_rates_near_the_fastest_count_as_equal_and_none_as_too_slow(rates: list[float]) -> None:
    believed = speeds(rates)
    for rate, speed in zip(rates, believed, strict=True):
        if rate * 3 >= max(rates):
            assert speed == max(rates)
        else:
            assert speed == max(rate, max(rates) / 16)
    assert speeds(believed) == believed
