# SPDX-License-Identifier: Apache-2.0
"""Every byte once, no rail starves, weights are followed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te import BLOCK, Blocks
from te.transports.rdma.meter import Meter
from te.transports.rdma.striping import (
    CUT_ALIGN,
    GRAIN_NBYTES,
    PENALTY,
    RATE_FLOOR,
    RATE_LEVEL,
    SPLIT_NBYTES,
    Lane,
    levelled,
    measured,
    nominal,
    pairs,
    partners,
    patience,
    reachable,
    shares,
    stripe,
)

pytestmark = pytest.mark.pure

RATES = st.floats(1e6, 50e9)


@st.composite
def blocks(draw: st.DrawFn) -> Blocks:
    """Blocks far apart on both sides, small and large ones in any mixture."""
    sizes = draw(
        st.lists(
            st.integers(1, 3 * CUT_ALIGN) | st.integers(1, 4 * SPLIT_NBYTES),
            min_size=0,
            max_size=40,
        )
    )
    array = np.empty(len(sizes), BLOCK)
    array["src"] = 1 << 32
    array["src"] += np.arange(len(sizes), dtype=np.uint64) * np.uint64(1 << 24)
    array["dst"] = array["src"][::-1] + np.uint64(1 << 40)
    array["nbytes"] = sizes
    return Blocks(array)


WEIGHTS = st.lists(st.floats(0, 100), min_size=1, max_size=16).filter(lambda w: sum(w) > 1e-3)


LANES = st.lists(
    st.builds(Lane, RATES, st.floats(0, 1e9), st.integers(0, len(PENALTY) - 1)),
    min_size=1,
    max_size=16,
)


def runs(blocks: Blocks, weights: list[float]) -> list[tuple[int, int]]:
    """By rail, the first of its bytes and the one behind the last, of all the blocks' in a row."""
    array = blocks.array
    marks = stripe(blocks, weights)
    assert len(marks) == len(weights) + 1
    starts = [0, *np.cumsum(array["nbytes"]).tolist()]
    assert all(
        (block, offset) == (len(array), 0) or offset < array["nbytes"][block]
        for block, offset in marks
    )
    at = [starts[block] + offset for block, offset in marks]
    return list(itertools.pairwise(at))


@given(blocks(), WEIGHTS)
def test_every_byte_goes_to_one_rail(some: Blocks, weights: list[float]) -> None:
    found = runs(some, weights)
    assert found[0][0] == 0
    assert found[-1][1] == some.total_nbytes
    assert all(start <= end for start, end in found)


@given(blocks(), WEIGHTS)
def test_weights_are_followed(some: Blocks, weights: list[float]) -> None:
    for (start, end), weight in zip(runs(some, weights), weights, strict=True):
        part = some.total_nbytes * weight / sum(weights)
        assert abs(end - start - part) <= SPLIT_NBYTES
        if weight == 0:
            assert start == end


@given(blocks(), WEIGHTS)
def test_small_blocks_stay_whole_and_cuts_are_aligned(some: Blocks, weights: list[float]) -> None:
    for block, offset in stripe(some, weights):
        assert offset % CUT_ALIGN == 0
        assert offset == 0 or some.array["nbytes"][block] >= SPLIT_NBYTES


def test_one_large_block_is_split_evenly() -> None:
    one = Blocks.of(0x10000, 0x900000, 4 << 20)
    assert stripe(one, [1.0] * 4) == [(0, 0), *((0, i << 20) for i in (1, 2, 3)), (1, 0)]


@given(LANES, st.integers(0, 1 << 36), st.integers(0, 100))
def test_shares_add_up_and_end_together(rails: list[Lane], total: int, turn: int) -> None:
    taken = shares(rails, total, turn)
    assert min(taken) >= 0
    assert sum(taken) == pytest.approx(total, rel=1e-9, abs=1e-3)
    floor = max(rail.rate for rail in rails) * RATE_FLOOR
    speed = [max(rail.rate, floor) / PENALTY[rail.distance] for rail in rails]
    ends = [
        (rail.in_flight + share) / one
        for rail, share, one in zip(rails, taken, speed, strict=True)
        if share > 1
    ]
    if ends:
        assert max(ends) == pytest.approx(min(ends), rel=1e-6, abs=1 / min(speed))


@given(LANES)
def test_no_rail_starves(rails: list[Lane]) -> None:
    """However slow a rail was and however much it has to do, enough bytes reach it."""
    slowest = RATE_FLOOR / max(PENALTY)
    most = max(rail.in_flight for rail in rails)
    worst = (most + GRAIN_NBYTES) * len(rails) / slowest**2
    assert min(shares(rails, int(worst))) > 0


@given(st.integers(2, 8), st.integers(1, 1000))
def test_small_transfers_go_round_idle_equals(count: int, total: int) -> None:
    seen = set()
    for turn in range(count):
        taken = shares([Lane(1e9)] * count, total, turn)
        seen.add(taken.index(max(taken)))
    assert seen == set(range(count))


@given(LANES, st.integers(1, 1 << 30), st.integers(1, 1 << 24))
def test_no_more_rails_than_grains(rails: list[Lane], total: int, grain: int) -> None:
    used = np.count_nonzero(shares(rails, total, grain_nbytes=grain))
    assert used <= max(1, -(-total // grain))


def test_a_busy_rail_is_passed_over_until_the_others_are_as_busy() -> None:
    rails = [Lane(1e9), Lane(1e9), Lane(1e9, 8e6)]
    assert shares(rails, 8_000_000) == [4e6, 4e6, 0]
    assert shares(rails, 40_000_000) == pytest.approx([16e6, 16e6, 8e6])


def test_far_rails_help_little() -> None:
    near, far = shares([Lane(1e9), Lane(1e9, distance=1)], 100_000_000)
    assert near / far == pytest.approx(PENALTY[1])


@given(st.lists(st.tuples(RATES, st.floats(1e-6, 10)), max_size=20), RATES)
def test_measured_rate_lies_between_what_was_seen(
    seen: list[tuple[float, float]], port: float
) -> None:
    (pace,) = nominal([port])
    low = high = port
    for rate, busy_s in seen:
        before = pace.rate
        pace = measured(pace, rate * busy_s, busy_s)
        low, high = min(low, rate), max(high, rate)
        # Never away from what was seen last, and never farther than anything ever seen.
        assert abs(pace.rate - rate) <= abs(before - rate) * 1.001 + 1 / busy_s
        assert low * 0.999 <= pace.rate <= high * 1.001 + 1 / busy_s


@given(RATES)
def test_no_time_changes_no_rate(rate: float) -> None:
    (pace,) = nominal([rate])
    assert measured(pace, 0, 0) is pace


@given(st.floats(0.01, 10))
def test_a_rail_that_moved_nothing_still_has_a_rate(busy_s: float) -> None:
    (pace,) = nominal([1e9])
    for _ in range(1000):
        pace = measured(pace, 0, busy_s)
    assert pace.rate > 0


def test_measured_rate_follows_in_seconds() -> None:
    pace = measured(nominal([1e9])[0], 1e9, 1.0)
    for _ in range(50):
        pace = measured(pace, 2e6, 0.1)
    assert pace.rate == pytest.approx(2e7, rel=0.02)


def test_the_speed_of_a_port_holds_until_something_was_measured() -> None:
    assert [pace.rate for pace in nominal([0, 5e9, 2e9])] == [5e9, 5e9, 2e9]
    one, other = nominal([0, 0])
    assert one.rate == other.rate > 0
    assert measured(one, 1e6, 0.01).rate == pytest.approx(one.rate, rel=0.05)


@given(st.lists(RATES, min_size=1, max_size=16))
def test_rates_near_the_fastest_count_as_equal(rates: list[float]) -> None:
    level = levelled(rates)
    for rate, believed in zip(rates, level, strict=True):
        assert believed == (max(rates) if rate * RATE_LEVEL >= max(rates) else rate)
    assert levelled(level) == level


DISTANCES = st.lists(st.none() | st.integers(0, len(PENALTY) - 1), min_size=1, max_size=8)


@given(DISTANCES, st.data())
def test_memory_uses_its_rails_and_others_only_without_them(
    distances: list[int | None], data: st.DataObject
) -> None:
    alive = data.draw(st.sets(st.integers(0, len(distances) - 1), min_size=1).map(sorted))
    rails, far = reachable(alive, distances)
    if any(distances[i] is not None for i in alive):
        assert rails == [i for i in alive if distances[i] is not None]
        assert far == [distances[i] for i in rails]
    else:
        assert rails == alive
        assert set(far) == {len(PENALTY) - 1}
    assert len(shares([Lane(1.0, 0, one) for one in far], 1)) == len(rails)


@given(st.lists(st.tuples(st.sampled_from([None, 0, 1, 2]), RATES), min_size=1, max_size=8))
def test_rails_help_the_sooner_the_nearer_and_the_faster_they_are(
    rails: list[tuple[int | None, float]],
) -> None:
    distances, rates = zip(*rails, strict=True)
    least = patience(distances, rates)
    assert [one == 0 for one in least] == [far is None for far in distances]
    for one, far, rate in zip(least, distances, rates, strict=True):
        if far is not None:
            assert one == min(255, int(2 * PENALTY[far] * min(16.0, max(rates) / rate)))


FLOWS = st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 10)), min_size=1, max_size=10)


@given(FLOWS, RATES)
def test_a_meter_counts_each_measurement_once(steps: list[tuple[int, float]], port: float) -> None:
    meter, (pace,), moved, total_s = Meter([port]), nominal([port]), 0, 0.0
    for nbytes, busy_s in steps:
        before, (moved, total_s) = (moved, total_s), (moved + nbytes, total_s + busy_s)
        pace = measured(pace, moved - before[0], total_s - before[1])
        flows = [(0, 0, moved, total_s)]
        assert meter.rates(flows) == meter.rates(flows) == [pace.rate]


@given(st.integers(1, 16), st.integers(1, 16))
def test_pairs_use_every_nic_evenly(local: int, remote: int) -> None:
    table = pairs(local, remote)
    assert len(table) == max(local, remote)
    for column, count in ((0, local), (1, remote)):
        uses = np.bincount(table[:, column], minlength=count)
        assert uses.min() >= 1
        assert uses.max() - uses.min() <= 1
    if local == remote:
        assert (table[:, 0] == table[:, 1]).all()


@given(st.integers(0, 15), st.integers(1, 16))
def test_partners_are_all_remote_nics_the_like_first(nic: int, remote: int) -> None:
    order = partners(nic, remote)
    assert sorted(order) == list(range(remote))
    assert order[0] == nic % remote


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: shares([Lane(0.0)], 1), "rates must be positive"),
        (lambda: shares([Lane(1.0, -1.0)], 1), "must not be negative"),
        (lambda: shares([Lane(1.0, 0, 9)], 1), "distances must be"),
        (lambda: shares([], 1), "no rail"),
        (lambda: stripe(Blocks.of(1, 1, 1), [0.0, 0.0]), "not all 0"),
        (lambda: stripe(Blocks.of(1, 1, 1), [1.0, -0.5]), "must not be negative"),
        (lambda: pairs(0, 2), "no rail between 0 local"),
    ],
)
def test_bad_input_is_named(call: object, says: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=says):
        call()
