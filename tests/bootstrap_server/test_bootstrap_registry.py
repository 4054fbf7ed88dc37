# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootstrap_server import NotReady, RankCoords, RankRecord, RegistrationRefused, Topology
from bootstrap_server.registry import Registry, RoomTable

MakeRecord = Callable[..., RankRecord]

SIZES = st.integers(1, 3)
TOPOLOGIES = st.builds(Topology, SIZES, SIZES, SIZES, SIZES)


@given(data=st.data(), topology=TOPOLOGIES)
def test_ready_when_and_only_when_all_coordinates_live_in_any_order(
    make_record: MakeRecord, data: st.DataObject, topology: Topology
) -> None:
    everyone = list(topology.coords())
    # Restarts mixed in: every rank at least once, some several times with growing epochs.
    order = data.draw(st.permutations(everyone + data.draw(st.lists(st.sampled_from(everyone)))))
    registry = Registry()
    seen: dict[RankCoords, int] = {}
    for epoch, coords in enumerate(order, start=1):
        registry.register(make_record(topology, coords, epoch))
        seen[coords] = epoch
        assert registry.registered == len(seen)
        assert registry.expected == topology.ranks
        assert registry.missing(10**6) == tuple(c for c in everyone if c not in seen)
        assert registry.ready == (len(seen) == topology.ranks)
    instance = registry.snapshot()
    assert {rank.coords: rank.epoch for rank in instance.ranks} == seen
    assert instance.generation == 1


@given(
    data=st.data(),
    topologies=st.lists(TOPOLOGIES, min_size=2, max_size=4),
)
def test_the_registry_agrees_with_a_model_over_generations(
    make_record: MakeRecord, data: st.DataObject, topologies: list[Topology]
) -> None:
    registry = Registry()
    config, live = None, {}
    for _ in range(data.draw(st.integers(1, 30))):
        topology = data.draw(st.sampled_from(topologies))
        coords = data.draw(st.sampled_from(list(topology.coords())))
        record = make_record(topology, coords, data.draw(st.integers(0, 6)))
        epoch = record.rank.epoch
        before = (registry.config, registry.registered, registry.generation, registry.missing())
        if config is None or (record.config != config and epoch > max(live.values())):
            config, live = record.config, {coords: epoch}
        elif record.config != config or epoch < live.get(coords, 0):
            with pytest.raises(RegistrationRefused):
                registry.register(record)
            after = (registry.config, registry.registered, registry.generation, registry.missing())
            assert after == before
            continue
        else:
            live[coords] = epoch
        registry.register(record)
        assert registry.config == config
        assert registry.ready == (live.keys() == set(config.topology.coords()))
        assert {c for c in config.topology.coords() if registry.find(c)} == live.keys()


def test_a_thousand_restarts_leave_one_entry(make_record: MakeRecord) -> None:
    registry, topology = Registry(), Topology(1, 1, 2, 1)
    for epoch in range(1, 1001):
        registry.register(make_record(topology, RankCoords(0, 0, 0, 0), epoch))
    assert (registry.registered, registry.expected, registry.ready) == (1, 2, False)


def test_a_former_life_cannot_take_its_place_back(make_record: MakeRecord) -> None:
    registry, topology = Registry(), Topology(1, 1, 1, 1)
    registry.register(make_record(topology, RankCoords(0, 0, 0, 0), 7))
    with pytest.raises(RegistrationRefused, match=r"epoch 6.*epoch 7"):
        registry.register(make_record(topology, RankCoords(0, 0, 0, 0), 6))
    registry.register(make_record(topology, RankCoords(0, 0, 0, 0), 7))
    assert registry.snapshot().ranks[0].epoch == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 1}, ["page_size 1,", "page_size 16;", "--page-size"]),
        ({"protocol": 2}, ["protocol 2,", "protocol 1;", "sglang-mooncake"]),
        (
            {"decode_allocation_policy": "prefill_complete"},
            ["prefill_complete", "early", "--disaggregation-decode-allocation-policy"],
        ),
    ],
)
def test_contradictions_name_both_values_and_the_flag(
    make_record: MakeRecord, changes: dict[str, object], words: list[str]
) -> None:
    registry, topology = Registry(), Topology(1, 1, 2, 1)
    registry.register(make_record(topology, RankCoords(0, 0, 0, 0), epoch=5))
    with pytest.raises(RegistrationRefused) as caught:
        registry.register(make_record(topology, RankCoords(0, 0, 1, 0), epoch=5, **changes))
    for word in words:
        assert word in str(caught.value)


def test_a_later_start_with_other_flags_begins_a_generation_and_says_so(
    make_record: MakeRecord,
) -> None:
    registry, old, new = Registry(), Topology(1, 1, 2, 1), Topology(1, 1, 4, 1)
    for coords in old.coords():
        registry.register(make_record(old, coords, epoch=10))
    registry.register(make_record(new, RankCoords(0, 0, 3, 0), epoch=20))
    # Its colleague started a little earlier and registers later: same generation.
    registry.register(make_record(new, RankCoords(0, 0, 0, 0), epoch=19))
    with pytest.raises(NotReady, match=r"2 of 4 ranks.*2 ranks with tp_size 2 were replaced"):
        registry.snapshot()
    with pytest.raises(RegistrationRefused, match=r"tp_size 2.*tp_size 4.*--tp-size"):
        registry.register(make_record(old, RankCoords(0, 0, 0, 0), epoch=10))
    for coords in new.coords():
        registry.register(make_record(new, coords, epoch=20))
    assert registry.snapshot().generation == 2


def test_who_is_missing_is_named_and_bounded(make_record: MakeRecord) -> None:
    registry, topology = Registry(), Topology(8, 1, 32, 1)
    with pytest.raises(NotReady, match="none of its ranks") as empty:
        registry.snapshot()
    assert (empty.value.registered, empty.value.expected, empty.value.missing) == (0, 0, ())
    registry.register(make_record(topology, RankCoords(0, 0, 0, 0)))
    with pytest.raises(NotReady, match=r"1 of 256.*\(dp 0 cp 0 tp 1 pp 0\).* 251 more") as partial:
        registry.snapshot()
    assert 0 < len(partial.value.missing) <= 64


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4))),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_rooms_expire_and_are_bounded_oldest_first(
    calls: list[tuple[int, int, int]], capacity: int, expiry_s: int
) -> None:
    table = RoomTable(capacity, expiry_s)
    model: list[tuple[int, int, int]] = []  # room, dp rank, time; oldest registration first
    now_s = 0
    for room, dp_rank, wait_s in calls:
        now_s += wait_s
        table.register(room, dp_rank, now_s)
        model = [entry for entry in model if entry[0] != room and now_s - entry[2] < expiry_s]
        model = [*model, (room, dp_rank, now_s)][-capacity:]
        assert len(table) == len(model)
        assert table.query(range(6), now_s) == {entry[0]: entry[1] for entry in model}
    assert table.query(range(6), now_s + expiry_s) == {}


@pytest.mark.parametrize(("capacity", "expiry_s"), [(0, 1.0), (1, 0.0)])
def test_room_table_needs_positive_bounds(capacity: int, expiry_s: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        RoomTable(capacity, expiry_s)
