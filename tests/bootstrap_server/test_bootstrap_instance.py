# SPDX-License-Identifier: Apache-2.0
"""One instance's ranks: who is live, who replaces whom, and when. Time is a number here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap_server import (
    LeaseLost,
    NotReady,
    PlaceTaken,
    RankCoords,
    RankRecord,
    RegistrationRefused,
    Topology,
)
from bootstrap_server.ranks.instance import InstanceTable

MakeRecord = Callable[..., RankRecord]

LEASE_S = 10.0
SIZES = st.integers(1, 3)
TOPOLOGIES = st.builds(Topology, SIZES, SIZES, SIZES, SIZES)
FIRST = RankCoords(0, 0, 0, 0)
PAIR = Topology(1, 1, 2, 1)
SECOND = RankCoords(0, 0, 1, 0)


def make_table() -> InstanceTable:
    return InstanceTable("default", LEASE_S, first_revision=1000)


def state(table: InstanceTable) -> tuple[object, ...]:
    """All that a refusal must leave as it was."""
    coords = () if table.config is None else tuple(table.config.topology.coords())
    ranks = tuple(table.find(place) for place in coords)
    return (table.config, table.generation, table.revision, table.ready, ranks)


@pytest.mark.slow
@given(data=st.data(), topology=TOPOLOGIES)
def test_ready_when_and_only_when_all_coordinates_live_in_any_order(
    make_record: MakeRecord, data: st.DataObject, topology: Topology
) -> None:
    everyone = list(topology.coords())
    # Restarts mixed in: every rank at least once, some several times with growing epochs.
    order = data.draw(st.permutations(everyone + data.draw(st.lists(st.sampled_from(everyone)))))
    table, seen = make_table(), dict[RankCoords, int]()
    for epoch, coords in enumerate(order, start=1):
        revision = table.revision
        table.register(make_record(topology, coords, epoch), 0, leased=True)
        assert table.revision > revision
        seen[coords] = epoch
        assert (table.registered, table.expected) == (len(seen), topology.ranks)
        assert table.missing(10**6) == tuple(c for c in everyone if c not in seen)
        assert table.ready == (len(seen) == topology.ranks)
    instance = table.snapshot()
    assert {rank.coords: rank.epoch for rank in instance.ranks} == seen
    assert (instance.generation, instance.revision) == (1, table.revision)


@dataclass
class Model:
    """The rules once more, as plainly as possible: a life is (endpoint, epoch, renewed or None)."""

    page_size: int | None = None
    lives: dict[RankCoords, tuple[int, int, float | None]] = None  # type: ignore[assignment]

    def expire(self, now_s: float) -> None:
        self.lives = {
            coords: life
            for coords, life in self.lives.items()
            if life[2] is None or now_s - life[2] < LEASE_S
        }

    def refusal(
        self, coords: RankCoords, port: int, epoch: int, page_size: int
    ) -> type[Exception] | None:
        others = [life for life in self.lives.values() if life[0] != port]
        if page_size != self.page_size and self.lives:
            if any(renewed_s is not None for _, _, renewed_s in others):
                return PlaceTaken
            if epoch <= max(life[1] for life in self.lives.values()):
                return RegistrationRefused
            return None
        if coords not in self.lives:
            return None
        holder_port, holder_epoch, renewed_s = self.lives[coords]
        if holder_port == port:
            return RegistrationRefused if epoch < holder_epoch else None
        return None if renewed_s is None else PlaceTaken


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150)
def test_the_table_agrees_with_a_model_of_the_rules(
    make_record: MakeRecord, data: st.DataObject
) -> None:
    table, model, now_s = make_table(), Model(lives={}), 0.0
    for _ in range(data.draw(st.integers(1, 30))):
        now_s += data.draw(st.sampled_from([0, 0, 1, LEASE_S / 3, LEASE_S]))
        model.expire(now_s)
        coords = data.draw(st.sampled_from(list(PAIR.coords())))
        epoch = data.draw(st.integers(0, 5))
        changes = ["register", "register", "renew", "release", "end", "expire"]
        match data.draw(st.sampled_from(changes)):
            case "register":
                port, page_size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 16]))
                leased = data.draw(st.booleans())
                record = make_record(PAIR, coords, epoch, page_size, port=port)
                refusal = model.refusal(coords, port, epoch, page_size)
                table.expire(now_s)
                before = state(table)
                if refusal is not None:
                    with pytest.raises(refusal) as caught:
                        table.register(record, now_s, leased=leased)
                    assert type(caught.value) is refusal
                    assert state(table) == before
                    continue
                table.register(record, now_s, leased=leased)
                if page_size != model.page_size:
                    model.page_size, model.lives = page_size, {}
                model.lives[coords] = (port, epoch, now_s if leased else None)
            case "expire":
                lapsed = table.expire(now_s)
                assert all(rank.coords not in model.lives for rank in lapsed)
            case "end":
                table.expire(now_s)
                if coords in model.lives and model.lives[coords][2] is not None:
                    table.end(coords)
                    del model.lives[coords]
            case change:
                life = model.lives.get(coords)
                call = table.renew if change == "renew" else table.release
                if life is None or life[1] != epoch or life[2] is None:
                    table.expire(now_s)
                    before = state(table)
                    with pytest.raises(LeaseLost):
                        call(coords, epoch, now_s)
                    assert state(table) == before
                    continue
                call(coords, epoch, now_s)
                if change == "renew":
                    model.lives[coords] = (life[0], epoch, now_s)
                else:
                    del model.lives[coords]
        table.expire(now_s)
        found = {place: table.find(place) for place in PAIR.coords()}
        live = {place: (rank.port, rank.epoch) for place, rank in found.items() if rank}
        assert live == {place: life[:2] for place, life in model.lives.items()}
        assert table.ready == (len(live) == PAIR.ranks)


def test_a_rank_lives_while_it_renews_and_its_going_is_explained(make_record: MakeRecord) -> None:
    table = make_table()
    for coords in PAIR.coords():
        table.register(make_record(PAIR, coords), 0, leased=True)
    table.renew(FIRST, 1, 6)
    assert table.expire(LEASE_S - 0.001) == []
    assert [rank.coords for rank in table.expire(LEASE_S)] == [SECOND]
    with pytest.raises(NotReady, match=r"1 of 2 .*tp 1.*port 10001 and has not renewed its lease"):
        table.snapshot()
    table.release(FIRST, 1, 12)
    with pytest.raises(NotReady, match=r"0 of 2 .*tp 0.*port 10000 and has been shut down"):
        table.snapshot()
    for coords in PAIR.coords():
        table.register(make_record(PAIR, coords, epoch=2), 13, leased=True)
    assert table.snapshot().generation == 1
    table.release(SECOND, 2, 14)
    table.register(make_record(PAIR, SECOND, epoch=3), 14, leased=True)
    assert table.ready


def test_a_rank_without_a_lease_never_lapses(make_record: MakeRecord) -> None:
    table, one = make_table(), Topology(1, 1, 1, 1)
    table.register(make_record(one, FIRST, epoch=0, protocol=0), 0, leased=False)
    assert table.expire(1e9) == []
    with pytest.raises(LeaseLost, match="has no lease"):
        table.renew(FIRST, 0, 1e9)
    # Another one takes its place: nothing tells its restart from a second server.
    table.register(make_record(one, FIRST, 0, protocol=0, port=5), 1e9, leased=False)
    assert table.snapshot().ranks[0].port == 5
    # One that can renew comes instead of one that cannot: a generation begins.
    table.register(make_record(one, FIRST, epoch=1, port=6), 1e9, leased=True)
    assert (table.generation, table.snapshot().ranks[0].port) == (2, 6)
    with pytest.raises(PlaceTaken):
        table.register(make_record(one, FIRST, epoch=0, protocol=0, port=5), 1e9, leased=False)


def test_a_second_server_with_this_address_displaces_nobody(make_record: MakeRecord) -> None:
    """The weakness of newer-epoch-wins: whoever started last had the place."""
    table = make_table()
    for coords in PAIR.coords():
        table.register(make_record(PAIR, coords), 0, leased=True)
    wrong = make_record(PAIR, FIRST, epoch=9, port=777)
    for now_s in range(1, 100, 3):
        for coords in PAIR.coords():
            table.renew(coords, 1, now_s)
        with pytest.raises(PlaceTaken) as caught:
            table.register(wrong, now_s + 1, leased=True)
        assert caught.value.left_s == LEASE_S - 1
    for words in (
        "(dp 0 cp 0 tp 0 pp 0)".strip("()"),
        "alive at 127.0.0.1 port 10000",
        "127.0.0.1 port 777",
        "--disaggregation-bootstrap-port",
        "in 9.0 s",
    ):
        assert words in str(caught.value)
    assert [rank.epoch for rank in table.snapshot().ranks] == [1, 1]


def test_a_restarted_rank_gets_its_place(make_record: MakeRecord) -> None:
    table, one = make_table(), Topology(1, 1, 1, 1)
    table.register(make_record(one, FIRST, epoch=1), 0, leased=True)
    # At the same endpoint at once: the former process cannot be listening there any more.
    table.register(make_record(one, FIRST, epoch=2), 1, leased=True)
    with pytest.raises(LeaseLost, match=r"epoch 1 has no lease: epoch 2 of it.*has taken"):
        table.renew(FIRST, 1, 1)
    with pytest.raises(
        RegistrationRefused, match=r"epoch 1 belongs to a process that has been replaced: epoch 2"
    ):
        table.register(make_record(one, FIRST, epoch=1), 2, leased=True)
    # At another one when the lease has lapsed, or was given back.
    elsewhere = make_record(one, FIRST, epoch=3, port=5)
    with pytest.raises(PlaceTaken) as caught:
        table.register(elsewhere, 4, leased=True)
    assert caught.value.left_s == 7
    table.register(elsewhere, 11, leased=True)
    table.release(FIRST, 3, 12)
    table.register(make_record(one, FIRST, epoch=4, port=6), 12, leased=True)
    assert table.snapshot().ranks[0].epoch == 4


def test_a_restart_with_other_flags_begins_a_generation_when_the_old_ranks_have_gone(
    make_record: MakeRecord,
) -> None:
    table, new = make_table(), Topology(1, 1, 4, 1)
    for at_s, coords in enumerate(PAIR.coords()):
        table.register(make_record(PAIR, coords), at_s, leased=True)
    record = make_record(new, SECOND, epoch=2, port=5)
    with pytest.raises(
        PlaceTaken, match=r"tp_size 4, but the 2 .*tp_size 2; .*--tp-size"
    ) as caught:
        table.register(record, 3, leased=True)
    assert caught.value.left_s == 8
    with pytest.raises(PlaceTaken, match="the 1 registered ranks") as caught:
        table.register(record, 10, leased=True)
    assert caught.value.left_s == 1
    table.register(record, 11, leased=True)
    assert (table.generation, table.registered, table.expected) == (2, 1, 4)


def test_ranks_that_cannot_say_they_live_give_way_to_one_that_can(make_record: MakeRecord) -> None:
    table, new = make_table(), Topology(1, 1, 4, 1)
    for coords in PAIR.coords():
        table.register(make_record(PAIR, coords, 0, protocol=0), 0, leased=False)
    with pytest.raises(RegistrationRefused, match=r"tp_size 4.*tp_size 2") as caught:
        table.register(make_record(new, FIRST, 0, protocol=0, port=5), 1, leased=False)
    assert not isinstance(caught.value, PlaceTaken)
    table.register(make_record(new, FIRST, 7), 1, leased=True)
    with pytest.raises(NotReady, match=r"1 of 4 ranks.*2 ranks with tp_size 2 were replaced"):
        table.snapshot()


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
    table = make_table()
    table.register(make_record(PAIR, FIRST, epoch=5), 0, leased=True)
    with pytest.raises(RegistrationRefused) as caught:
        table.register(make_record(PAIR, SECOND, epoch=6, **changes), 0, leased=True)
    for word in words:
        assert word in str(caught.value)


def test_a_thousand_restarts_leave_one_entry(make_record: MakeRecord) -> None:
    table = make_table()
    for epoch in range(1, 1001):
        now_s = epoch * (LEASE_S + 1)
        record = make_record(PAIR, FIRST, epoch, port=1 + epoch % 3)
        table.register(record, now_s, leased=True)
    assert (table.registered, table.expected, table.ready) == (1, 2, False)
    assert len(table._ranks) == len(table._renewed_s) == 1
    assert table.generation == 1


def test_who_is_missing_is_named_and_bounded(make_record: MakeRecord) -> None:
    table, topology = make_table(), Topology(8, 1, 32, 1)
    with pytest.raises(NotReady, match="none of its ranks") as empty:
        table.snapshot()
    assert (empty.value.registered, empty.value.expected, empty.value.missing) == (0, 0, ())
    for coords in topology.coords():
        table.register(make_record(topology, coords), 0, leased=True)
    table.expire(LEASE_S)
    table.register(make_record(topology, FIRST, epoch=2), LEASE_S, leased=True)
    with pytest.raises(NotReady, match=r"1 of 256.*\(dp 0 cp 0 tp 1 pp 0\).* 251 more") as partial:
        table.snapshot()
    assert 0 < len(partial.value.missing) <= 64
    assert len(table._gone) <= 64
