# SPDX-License-Identifier: Apache-2.0
"""Several instances in one registry, and the time by which leases end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import RankCoords, RankRecord, Topology
from bootstrap_server.ranks import registry
from bootstrap_server.ranks.errors import RegistryFull
from bootstrap_server.ranks.registry import Registry, role_of
from bootstrap_server.running import RunningClock

MakeRecord = Callable[..., RankRecord]

ONE = Topology(1, 1, 1, 1)
FIRST = RankCoords(0, 0, 0, 0)


def test_instances_know_nothing_of_each_other(make_record: MakeRecord) -> None:
    instances = Registry(10, first_revision=5)
    for number, name in enumerate(("default", "a", "b")):
        record = make_record(Topology(1, 1, 1 + number, 1), FIRST, page_size=1 + number)
        instances.register(name, record, number, leased=True)
    assert [table.name for table in instances.tables()] == ["default", "a", "b"]
    assert [table.expected for table in instances.tables()] == [1, 2, 3]
    assert instances.registered("prefill") == 3
    assert instances.get("default") is instances.default
    assert all(table.revision > 5 for table in instances.tables())
    assert [name for name, _ in instances.expire(11)] == ["default", "a"]
    # A named instance is forgotten with its last rank, the default one stays (empty).
    assert [table.name for table in instances.tables()] == ["default", "b"]
    assert instances.get("a").config is None
    assert instances.get("a").revision > 5


def test_revisions_go_on_when_an_instance_comes_back(make_record: MakeRecord) -> None:
    instances, seen = Registry(10), 0
    for start in range(5):
        now_s = 20.0 * start
        table = instances.register("a", make_record(ONE, FIRST), now_s, leased=True)
        assert table.snapshot().revision > seen
        seen = table.snapshot().revision
        instances.expire(now_s + 10)


def test_memory_is_bounded(make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RANKS_MAX", 3)
    monkeypatch.setattr(registry, "INSTANCES_MAX", 3)
    topology, instances = Topology(1, 1, 4, 1), Registry()
    for tp in range(2):
        instances.register("a", make_record(topology, RankCoords(0, 0, tp, 0)), 0, leased=True)
    instances.register("b", make_record(ONE, FIRST), 0, leased=True)
    with pytest.raises(RegistryFull, match="3 live ranks"):
        instances.register("a", make_record(topology, RankCoords(0, 0, 2, 0)), 0, leased=True)
    with pytest.raises(RegistryFull, match="3 instances"):
        instances.register("c", make_record(ONE, FIRST), 0, leased=True)
    # Those that are there may register again.
    instances.register("b", make_record(ONE, FIRST, epoch=2), 0, leased=True)
    assert instances.registered("prefill") == 3


def test_decode_servers_take_no_place_of_prefill_instances(
    make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RANKS_MAX", 1)
    monkeypatch.setattr(registry, "INSTANCES_MAX", 1)
    instances = Registry(10)
    record = make_record(ONE, FIRST)
    shown = instances.register("default", record, 0, leased=True, role="decode")
    assert (shown.role, role_of(shown.name)) == ("decode", "decode")
    with pytest.raises(RegistryFull, match="1 instances"):
        instances.register("b", record, 0, leased=True, role="decode")
    # It is not what SGLang's routes serve, and nobody who looks for a prefill instance finds it.
    assert not instances.default.ready
    table = instances.register("default", make_record(ONE, FIRST, page_size=1), 0, leased=True)
    assert (table, role_of(table.name)) == (instances.default, "prefill")
    with pytest.raises(ValueError, match="instance name"):
        instances.get(shown.name)
    assert [one.name for one in instances.of("decode")] == [shown.name]
    assert [one.name for one in instances.of("prefill")] == ["default"]
    assert {name for name, _ in instances.expire(10)} == {"default", shown.name}
    assert instances.of("decode") == ()


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "é", "x" * 65, "a\n"])
def test_bad_names(make_record: MakeRecord, name: str) -> None:
    instances = Registry()
    with pytest.raises(ValueError, match="instance name"):
        instances.register(name, make_record(ONE, FIRST), 0, leased=True)
    with pytest.raises(ValueError, match="instance name"):
        instances.get(name)


@pytest.mark.parametrize("lease_s", [0.0, -1.0])
def test_a_lease_must_last(lease_s: float) -> None:
    with pytest.raises(ValueError, match="lease_s"):
        Registry(lease_s)


@given(st.lists(st.floats(0, 100)), st.floats(0.1, 10))
def test_time_in_which_the_server_was_held_does_not_count(
    steps_s: list[float], step_max_s: float
) -> None:
    seen_s = [7.0]
    clock = RunningClock(lambda: seen_s[0], step_max_s)
    expected_s = 0.0
    for step_s in steps_s:
        seen_s[0] += step_s
        expected_s += min(step_s, step_max_s)
        assert clock.now_s() == pytest.approx(expected_s)
