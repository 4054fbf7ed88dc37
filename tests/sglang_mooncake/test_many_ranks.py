# SPDX-License-Identifier: Apache-2.0
"""The hand-over between instances of different shape: every byte a rank stores arrives once, from
the right ranks, and when one of many ranks fails, none of the others is left waiting."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from fleet import Handed, Model, Ranks, ranks
from handover import CANARY, until

from bootstrap_server import RankCoords, Topology
from bootstrap_server.ranks.matching import CPTransfer
from sglang_mooncake.rooms.states import RoomState

GQA = Model(heads=4)
MLA = Model(heads=1, is_mla=True)


def tp(size: int, dp: int = 1, pp: int = 1, cp: int = 1) -> Topology:
    return Topology(dp_size=dp, cp_size=cp, tp_size=size, pp_size=pp)


SHAPES = {
    "tp1-tp2": (GQA, tp(1), tp(2)),
    "tp2-tp1": (GQA, tp(2), tp(1)),
    "tp2-tp2": (GQA, tp(2), tp(2)),
    "heads-replicated-on-prefill": (Model(heads=2), tp(4), tp(2)),
    "heads-replicated-on-decode": (Model(heads=2), tp(2), tp(4)),
    "heads-replicated-on-both": (Model(heads=1), tp(4), tp(2)),
    "neither-size-divides": (Model(heads=6), tp(2), tp(3)),
    "dp2-tp1": (GQA, tp(1, dp=2), tp(1)),
    "tp2-dp2": (GQA, tp(2), tp(1, dp=2)),
    "pp2-pp1": (GQA, tp(1, pp=2), tp(1)),
    "pp2-pp2": (GQA, tp(1, pp=2), tp(2, pp=2)),
    "tp2-pp2-tp1": (GQA, tp(2, pp=2), tp(1)),
    "mla-tp2-tp1": (MLA, tp(2), tp(1)),
    "mla-tp1-tp2": (MLA, tp(1), tp(2)),
    "mla-tp4-dp2": (MLA, tp(4), tp(1, dp=2)),
    "state-tp2-tp1": (Model(heads=4, channels=8), tp(2), tp(1)),
    "state-tp1-tp2": (Model(heads=4, channels=8), tp(1), tp(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_arrives_and_no_other_changes(shape):
    model, prefill, decode = SHAPES[shape]
    with ranks(model, prefill, decode) as instance:
        for decode_dp in range(decode.dp_size):
            for prefill_dp in range(prefill.dp_size):
                room = 10 * decode_dp + prefill_dp + 1
                instance.complete(room, [5, 0, 1, 7], prefill_dp, decode_dp)
        instance.complete(100, [6])


@pytest.mark.parametrize("cp", [CPTransfer.FIRST, CPTransfer.PAGES])
@pytest.mark.parametrize("model", [GQA, Model(heads=1, is_mla=True, channels=4)], ids=str)
def test_cp_ranks_send_the_pages_that_they_are_asked_for(cp, model):
    with ranks(model, tp(1, cp=3), tp(1), cp=cp) as instance:
        instance.complete(1, [3, 3, 4])
        instance.complete(2, [1])  # fewer pages than ranks


def test_a_fully_cached_prompt_hands_over_its_metadata_alone():
    with ranks(GQA, tp(2), tp(1)) as instance:
        instance.complete(1, [0])


def test_many_rooms_at_once_through_the_same_links():
    with ranks(GQA, tp(2), tp(1)) as instance:
        open_rooms = [instance.open(room) for room in range(1, 9)]
        for handed in open_rooms:
            instance.name_pages(handed, 3)
            for coords, use in handed.sources.items():
                until(lambda use=use: use.view.state is RoomState.READY, "the rank was asked")
                instance.send(handed, coords, [3])
            instance.arrive(handed)
            instance.check(handed)


def _asked(instance: Ranks, room: int = 1) -> Handed:
    """A room that every rank has met, with pages named."""
    handed = instance.open(room)
    instance.name_pages(handed, 4)
    for use in handed.sources.values():
        until(lambda use=use: use.view.state is RoomState.READY, "the rank was asked")
    return handed


def _ended(handed: Handed) -> None:
    for room in handed.uses:
        until(lambda room=room: room.view.over, "every rank lets go of the room")
        assert room.view.state is not RoomState.DONE
        assert room.view.reason


def test_an_abort_on_one_prefill_rank_ends_the_room_on_all_ranks():
    with ranks(GQA, tp(2), tp(1)) as instance:
        handed = _asked(instance)
        first, second = handed.sources
        instance.prefill[first].side.abort(handed.sources[first], "client gone")
        _ended(handed)
        assert "client gone" in (handed.sources[second].view.reason or "")
        instance.complete(2, [4])


def test_an_abort_on_one_decode_rank_ends_the_room_on_all_ranks():
    with ranks(GQA, tp(1), tp(2)) as instance:
        handed = _asked(instance)
        first, second = handed.targets
        instance.decode[first].side.abort(handed.targets[first], "client gone")
        _ended(handed)
        assert "client gone" in (handed.targets[second].view.reason or "")
        instance.complete(2, [4])


def test_after_an_abort_nothing_of_any_source_lands():
    with ranks(GQA, tp(2), tp(1)) as instance:
        handed = _asked(instance)
        (target,) = handed.targets
        instance.decode[target].side.abort(handed.targets[target], "client gone")
        until(lambda: handed.targets[target].view.over, "the pages are fenced")
        for coords in handed.sources:
            instance.send(handed, coords, [4])
        _ended(handed)
        assert (instance.memory["decode", target].kv == CANARY).all()


@pytest.mark.parametrize("model", [GQA, MLA], ids=["a source", "a replica that sends nothing"])
def test_a_prefill_rank_that_dies_ends_the_room_on_all_others(model):
    with ranks(model, tp(2), tp(1)) as instance:
        handed = _asked(instance)
        first, second = handed.sources
        instance.prefill[second].close()
        (room,) = handed.targets.values()
        until(lambda: room.view.over, "the decode room failed")
        assert "lost the connection to prefill rank (dp 0 cp 0 tp 1 pp 0)" in (
            room.view.reason or ""
        )
        until(lambda: handed.sources[first].view.over, "the other prefill rank is told")
        assert "lost the connection" in (handed.sources[first].view.reason or "")


def test_a_decode_rank_that_dies_ends_the_room_on_all_others():
    with ranks(GQA, tp(1), tp(2)) as instance:
        handed = _asked(instance)
        first, second = handed.targets
        instance.decode[second].close()
        (source,) = handed.sources.values()
        until(lambda: source.view.over, "the prefill room failed")
        # Whichever of its connections goes first.
        assert re.search("lost the (data|control) connection to decode", source.view.reason or "")
        until(lambda: handed.targets[first].view.over, "the other decode rank is told")


def test_a_source_that_sends_nothing_leaves_the_room_waiting_until_its_deadline():
    with ranks(GQA, tp(2), tp(1)) as instance:
        handed = _asked(instance)
        first, _ = handed.sources
        instance.send(handed, first, [4])
        until(lambda: handed.sources[first].view.state is RoomState.DONE, "one source is done")
        ((rank, target),) = handed.targets.items()
        rooms = instance.decode[rank].side._rooms
        rooms._deadlines = replace(rooms._deadlines, waiting_s=0.5)
        until(lambda: target.view.over, "the room timed out")
        assert target.view.state is RoomState.TIMED_OUT
        for room in handed.sources.values():
            until(lambda room=room: room.view.over, "no source is left waiting")


@pytest.mark.usefixtures("short_grace")
def test_ranks_of_another_model_are_refused_with_both_values_and_nobody_waits():
    with ranks(Model(heads=4), tp(2), tp(2), decode_model=Model(heads=2)) as instance:
        handed = instance.open(1)
        _ended(handed)
        for room in handed.uses:
            for part in ("4 units", "2 units", "same model"):
                assert part in (room.view.reason or "")


@pytest.mark.usefixtures("short_grace")
def test_heads_that_cannot_be_dealt_out_are_refused_and_nobody_waits():
    with ranks(Model(heads=3), tp(3), tp(2), decode_model=Model(heads=4)) as instance:
        handed = instance.open(1)
        _ended(handed)
        for room in handed.uses:
            for part in ("4 KV heads", "attention TP size of 3", "--tp-size"):
                assert part in (room.view.reason or "")


@pytest.mark.usefixtures("short_grace")
def test_pipelines_that_do_not_fit_are_refused_with_both_values_and_nobody_waits():
    with ranks(GQA, tp(1, pp=4), tp(1, pp=2)) as instance:
        handed = instance.open(1)
        _ended(handed)
        for room in handed.uses:
            for part in ("4", "2", "--pp-size"):
                assert part in (room.view.reason or "")


@pytest.mark.usefixtures("short_grace")
def test_one_rank_that_cannot_be_linked_ends_the_room_on_the_others():
    with ranks(GQA, tp(2), tp(1)) as instance:
        instance.prefill[RankCoords(0, 0, 1, 0)].close()
        handed = instance.open(1)
        first, _ = handed.sources
        (target,) = handed.targets.values()
        until(lambda: target.view.over, "the decode room failed")
        until(lambda: handed.sources[first].view.over, "the other prefill rank is told")
        assert "tp 1" in (handed.sources[first].view.reason or "")
