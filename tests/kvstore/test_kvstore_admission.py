# SPDX-License-Identifier: Apache-2.0
"""Which objects are worth loading: the rules."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.admission import (
    FADES,
    MEASURED_MIN,
    PROBE_ONE_IN,
    PROBE_SHARE,
    PROBE_SLOT_S,
    Admitted,
    Speed,
    admit,
    expected_s,
    is_probe,
)

pytestmark = pytest.mark.pure

times_s = st.floats(1e-6, 10.0)
runs = st.lists(st.integers(0, 5), max_size=60).map(lambda one: np.array(one, np.uint16))
speeds = st.dictionaries(st.integers(0, 5), times_s)


def load_s(owners: np.ndarray, each_s: dict[int, float]) -> float:
    """What a load of all of them takes, said another way: owner by owner, object by object."""
    spent: dict[int, float] = {}
    for one in owners.tolist():
        spent[one] = spent.get(one, 0.0) + each_s.get(one, 0.0)
    return max(spent.values(), default=0.0)


@given(runs, speeds, times_s)
def test_what_is_offered_gains_the_most(
    owners: np.ndarray, each_s: dict[int, float], compute_s: float
) -> None:
    got = admit(owners, each_s, compute_s)
    assert got.found == len(owners)
    gains = [k * compute_s - load_s(owners[:k], each_s) for k in range(len(owners) + 1)]
    assert gains[got.offered] == pytest.approx(max(gains), rel=1e-9, abs=1e-9)
    if got.found:
        assert got.load_s == pytest.approx(load_s(owners, each_s))


@given(runs, speeds)
def test_everything_is_offered_while_one_of_the_two_is_not_known(
    owners: np.ndarray, each_s: dict[int, float]
) -> None:
    assert admit(owners, each_s, None) == Admitted(len(owners), len(owners))
    assert admit(owners, {}, 1e-9).offered == len(owners)


@given(runs, speeds, times_s, times_s)
def test_a_slower_owner_never_has_more_offered(
    owners: np.ndarray, each_s: dict[int, float], compute_s: float, more_s: float
) -> None:
    slower = {one: each + more_s for one, each in each_s.items()}
    before, after = admit(owners, each_s, compute_s), admit(owners, slower, compute_s)
    if len(set(owners.tolist())) <= 1:  # Of several, another one may be what is waited for.
        assert after.offered <= before.offered
    assert admit(owners, each_s, compute_s + more_s).offered >= before.offered


@pytest.mark.slow
@given(runs.filter(len), speeds, times_s)
def test_a_probe_offers_a_little_more(
    owners: np.ndarray, each_s: dict[int, float], compute_s: float
) -> None:
    plain = admit(owners, each_s, compute_s)
    probe = admit(owners, each_s, compute_s, probe=True)
    if not plain.declined:
        assert probe == plain
        return
    assert probe.probe
    assert plain.offered < probe.offered <= probe.found
    more_s = load_s(owners[: probe.offered], each_s) - load_s(owners[: plain.offered], each_s)
    share_s = PROBE_SHARE * len(owners) * compute_s
    assert probe.offered == plain.offered + 1 or more_s <= share_s * (1 + 1e-9)


def test_a_cut_lies_before_the_pages_of_a_slow_owner() -> None:
    owners = np.array([0] * 6 + [1] * 4, np.uint16)
    each_s = {0: 0.1, 1: 5.0}
    assert admit(owners, each_s, 1.0) == Admitted(10, 6, 20.0, 10.0)
    assert admit(owners, each_s, 1.0).declined == 4
    assert admit(owners[::-1], each_s, 1.0).offered == 0
    assert admit(owners[::-1], each_s, 1.0, probe=True).offered == 1
    assert admit(np.array([], np.uint16), each_s, 1.0) == Admitted(0, 0)


def test_what_a_load_is_expected_to_take() -> None:
    owners = np.array([0, 0, 1, 0], np.uint16)
    assert expected_s(owners, {0: 1.0, 1: 2.0}) == 3.0
    assert expected_s(owners, {0: 1.0}) is None
    assert expected_s(np.array([], np.uint16), {0: 1.0}) is None


@given(st.lists(st.tuples(times_s, st.floats(1, 1e9)), max_size=20))
def test_a_speed_lies_between_what_was_measured(measured: list[tuple[float, float]]) -> None:
    speed = Speed()
    for seconds, amount in measured:
        speed.took(seconds, amount)
    each = [seconds / amount for seconds, amount in measured]
    if len(measured) < MEASURED_MIN:
        assert speed.seconds_per_unit is None
    else:
        assert speed.seconds_per_unit is not None
        assert min(each) * 0.999 <= speed.seconds_per_unit <= max(each) * 1.001


def test_a_speed_follows_what_has_changed() -> None:
    speed = Speed()
    for _ in range(10):
        speed.took(10.0, 1.0)
    for _ in range(20):
        speed.took(1.0, 1.0)
    assert speed.seconds_per_unit is not None
    assert 1.0 < speed.seconds_per_unit < 1.0 + 10 * FADES**20 * 1.1
    for _ in range(10):
        speed.took(1e6, 1e6)
    assert speed.seconds_per_unit == pytest.approx(1.0)
    speed.took(10.0, 1.0)
    assert speed.seconds_per_unit == pytest.approx(1.0, rel=1e-3), "few units say little"
    speed.took(0.5, 1.0)
    assert speed.seconds_per_unit == pytest.approx(0.75, rel=1e-3), "unless they were faster"
    idle = Speed()
    for _ in range(MEASURED_MIN):
        idle.took(1.0, 0.0)
    assert idle.seconds_per_unit is None


@given(st.binary(min_size=16, max_size=16))
def test_every_prompt_is_a_probe_now_and_then(key: bytes) -> None:
    times = [slot * PROBE_SLOT_S for slot in range(400)]
    count = sum(is_probe(key, one) for one in times)
    assert 400 / PROBE_ONE_IN / 2.5 < count < 400 / PROBE_ONE_IN * 2.5
    assert is_probe(key, times[7]) == is_probe(key, times[7] + 0.9 * PROBE_SLOT_S)
