# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms: the cases that matter by name."""

from __future__ import annotations

import pytest
from plain_plan import AUX_NBYTES, LAYER_NBYTES, LAYERS, PlainPlan, plan_of
from prefill_rooms import (
    CHUNK_TIMEOUT_S,
    TIMEOUT_S,
    Rooms,
    chunk,
    ended,
    nothing_wanted,
    opened,
    ready,
    request,
)

from bootstrap_server.ranks.matching import PageShare
from sglang_mooncake.executor import Executor
from sglang_mooncake.layout import COMPLETION_BYTES, CompletionRecord
from sglang_mooncake.rooms.prefill import (
    Aborted,
    CancelWrites,
    ChunkSent,
    Closed,
    LayersFilled,
    Misdirected,
    Opened,
    Over,
    PeerLost,
    PrefillRooms,
    Requested,
    Tell,
    Tick,
    Write,
)
from sglang_mooncake.rooms.prefill_room import MISDIRECTED_S
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.side import broken


def test_a_room_goes_from_open_to_done():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    assert room.view.decode_prefix_len == 3
    (first,) = rooms.handle(ChunkSent(room, chunk(1, last=False)), 0)
    (second,) = rooms.handle(ChunkSent(room, chunk(1, first=1)), 0)
    assert isinstance(first, Write)
    assert isinstance(second, Write)
    assert first.completion is None
    assert second.completion == CompletionRecord(
        generation=1,
        writes=2,
        pages=2,
        page_layers=2 * LAYERS,
        states=0,
        aux=1,
        digests=0,
        nbytes=2 * LAYERS * LAYER_NBYTES + AUX_NBYTES + COMPLETION_BYTES,
    )
    assert room.view.state is RoomState.ALL_SENT
    assert rooms.handle(ended(rooms, room), 0) == []
    assert room.view.state is RoomState.ALL_SENT
    rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.DONE
    assert rooms.handle(Closed(room), 0) == []
    assert len(rooms) == 0


def test_a_room_that_its_scheduler_lets_go_of_is_aborted_by_its_text_too():
    """By which SGLang's tests know it."""
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Closed(room), 0)
    assert room.view.state is RoomState.ABORTED
    assert "abort" in room.view.reason


def test_a_room_with_several_decode_ranks_waits_for_all_and_writes_to_each():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=2)), 0)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Requested("b", request(1, destinations=2)), 0)
    writes = rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert [w.peer for w in writes if isinstance(w, Write)] == ["a", "b"]


def test_decode_ranks_that_disagree_on_their_number_fail_the_room():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=3)), 0)
    tells = rooms.handle(Requested("b", request(1, destinations=2)), 0)
    assert [i.peer for i in tells if isinstance(i, Tell)] == ["a", "b"]
    assert room.view.state is RoomState.FAILED
    assert "[2, 3]" in (room.view.reason or "")


def test_decode_ranks_that_hold_different_prefixes_fail_the_room():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=2, prefix=0)), 0)
    tells = rooms.handle(Requested("b", request(1, destinations=2, prefix=16)), 0)
    assert [i.peer for i in tells if isinstance(i, Tell)] == ["a", "b"]
    assert room.view.state is RoomState.FAILED
    assert "[0, 16]" in (room.view.reason or "")


def test_a_decode_rank_too_many_is_left_for_the_next_use_of_the_room_number():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    assert rooms.handle(Requested("c", request(1, destinations=1)), 0) == []
    assert room.view.state is RoomState.READY
    writes = rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert [write.peer for write in writes if isinstance(write, Write)] == ["a", "b"]
    again = opened(rooms)
    assert again.view.state is RoomState.READY


def test_a_rank_that_sends_no_byte_is_done_with_its_last_chunk():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", nothing_wanted(1)), 0)
    assert room.view.state is RoomState.READY
    assert room.view.decode_prefix_len == 3
    assert rooms.handle(ChunkSent(room, chunk(1, last=False)), 0) == []
    assert room.view.state is RoomState.SENDING
    assert rooms.handle(ChunkSent(room, chunk(4, first=1)), 0) == [Over(room)]
    assert room.view.state is RoomState.DONE


def test_a_chunk_leaves_for_one_decode_rank_before_it_is_planned_for_the_next():
    happened = []

    class Plan(PlainPlan):
        def __init__(self, peer):
            super().__init__()
            self.peer = peer

        def part(self, *args):
            happened.append(f"planned for {self.peer}")
            return super().part(*args)

    def perform(instruction):
        if isinstance(instruction, Write):
            happened.append(f"written to {instruction.peer}")

    executor = Executor(
        PrefillRooms(Plan, TIMEOUT_S, CHUNK_TIMEOUT_S).handle, perform, broken, clock=lambda: 0.0
    )
    room = Room(1, 0.0)
    executor.submit(Opened(room))
    for peer in "ab":
        executor.submit(Requested(peer, request(1, destinations=2)))
    in_turn = ["planned for a", "written to a", "planned for b", "written to b"]
    executor.submit(LayersFilled(room, chunk(2).pages, 0, 1, 0.0))
    assert happened == in_turn
    executor.submit(ChunkSent(room, chunk(2)))
    assert happened == 2 * in_turn


def test_a_chunk_that_cannot_be_planned_for_a_later_decode_rank_stops_the_first_write():
    class Plan(PlainPlan):
        def part(self, *args):
            raise ValueError("its pages do not fit")

    rooms = Rooms(lambda peer: Plan() if peer == "b" else PlainPlan(), TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    for peer in "abc":
        rooms.handle(Requested(peer, request(1, destinations=3)), 0)
    write, *tells, cancel = rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert isinstance(write, Write)
    assert [tell.peer for tell in tells if isinstance(tell, Tell)] == ["a", "b", "c"]
    assert cancel == CancelWrites(room, (write.key,))
    assert room.view.state is RoomState.ENDING
    assert rooms.handle(ended(rooms, room, "cancelled"), 0) == [Over(room)]
    assert "its pages do not fit" in (room.view.reason or "")


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_room_whose_request_leads_elsewhere_waits_only_where_others_have_come(is_linked):
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, is_linked=lambda: is_linked)
    room, asked = opened(rooms), opened(rooms, 2)
    for one in (room, asked):
        rooms.handle(Misdirected(one, "the request names port 1"), 0)
    rooms.handle(Requested("a", request(2, destinations=1)), 0)
    assert rooms.handle(Tick(), MISDIRECTED_S - 0.1) == []
    said = rooms.handle(Tick(), MISDIRECTED_S)
    assert said == ([] if is_linked else [Over(room)])
    assert (room.view.reason is None) == is_linked
    assert asked.view.state is RoomState.READY
    is_linked = False
    assert rooms.handle(Tick(), MISDIRECTED_S + 1) == [], "it is looked at once"


def test_a_rank_writes_to_those_alone_who_want_something_of_it():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", nothing_wanted(1, destinations=2)), 0)
    assert room.view.state is RoomState.OPEN
    rooms.handle(Requested("b", request(1, destinations=2)), 0)
    (write,) = rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert isinstance(write, Write)
    assert write.peer == "b"
    rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.DONE


def test_a_rank_with_a_share_of_the_pages_writes_these_and_counts_only_its_own_writes():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, pages=6, share=PageShare(1, 3))), 0)
    spans = []
    for first, last in ((0, False), (2, False), (4, True)):
        for write in rooms.handle(ChunkSent(room, chunk(2, first, last)), 0):
            assert isinstance(write, Write)
            spans.append(
                (write.span, write.completion and (write.completion.writes, write.completion.pages))
            )
    assert spans == [(range(2, 4), None), (range(4, 4), (2, 2))], (
        "the last one carries the completion record"
    )


def test_a_decode_rank_that_is_lost_fails_the_room_for_the_others_too():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    tell, cancel = rooms.handle(PeerLost("a", "gone"), 0)
    assert isinstance(tell, Tell)
    assert tell.peer == "b"
    assert cancel == CancelWrites(room, (("a", 1), ("b", 1)))
    rooms.handle(ended(rooms, room, "cancelled"), 0)
    assert room.view.state is RoomState.ENDING, "one write still reads the pages"
    rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.FAILED


def test_a_room_that_some_asked_for_times_out_with_their_number():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=4)), 0)
    (tell, _) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell, Tell)
    said = f"1 of 4 decode ranks asked for room 1 within {TIMEOUT_S:.0f} s (bootstrap_s)"
    assert room.view.reason == said


def test_an_abort_with_writes_under_way_waits_until_they_have_ended():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    told = rooms.handle(Aborted(room, "client gone"), 0)
    assert [type(i) for i in told] == [Tell, CancelWrites]
    assert room.view.state is RoomState.ENDING
    rooms.handle(ended(rooms, room, "cancelled"), 0)
    assert room.view.state is RoomState.ABORTED
    assert room.view.reason == "client gone"


def test_a_failed_write_fails_the_room_and_tells_the_decode_rank():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    (tell, *_) = rooms.handle(ended(rooms, room, "peer frozen"), 0)
    assert isinstance(tell, Tell)
    assert tell.message.reason == "prefill side: peer frozen"
    assert room.view.state is RoomState.FAILED


def test_a_lost_peer_fails_its_rooms_and_is_not_told():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room, other = ready(rooms), opened(rooms, 2)
    assert rooms.handle(PeerLost("a", "gone"), 0) == [Over(room)]
    assert room.view.state is RoomState.FAILED
    assert other.view.state is RoomState.OPEN


def test_opening_a_room_number_again_supersedes_its_former_use():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    again = opened(rooms)
    assert former.view.state is RoomState.SUPERSEDED
    assert again.view.state is RoomState.OPEN
    rooms.handle(Requested("a", request(1, generation=2)), 0)
    assert again.view.state is RoomState.READY


def test_a_repeated_request_changes_nothing():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    assert rooms.handle(Requested("a", request(1)), 0) == []
    assert room.view.state is RoomState.READY


@pytest.mark.parametrize("bad", [chunk(3), chunk(1), chunk(3, last=False)], ids=str)
def test_chunks_that_do_not_fit_the_request_fail_the_room(bad):
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    rooms.handle(ChunkSent(room, bad), 0)
    assert room.view.state is RoomState.FAILED
    assert "--page-size" in (room.view.reason or "")


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(1, first=1)],
        [chunk(1, last=False), chunk(0, first=2)],
        [chunk(1, last=False), chunk(1, first=0, last=False)],
        [chunk(2), chunk(0, first=2)],
    ],
    ids=["overtakes", "misses a page", "comes twice", "follows the last"],
)
def test_a_chunk_that_does_not_follow_the_one_before_fails_the_room_and_all_are_told(chunks):
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = ready(rooms)
    for one in chunks[:-1]:
        rooms.handle(ChunkSent(room, one), 0)
    tell, *_ = rooms.handle(ChunkSent(room, chunks[-1]), 0)
    assert isinstance(tell, Tell)
    assert "a chunk was lost or overtaken" in tell.message.reason
    assert room.view.end is RoomState.FAILED


def test_a_scheduler_that_sends_nothing_more_ends_the_room():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    idle, started = ready(rooms, 1), ready(rooms, 2)
    rooms.handle(ChunkSent(started, chunk(1, last=False)), 5)
    rooms.handle(ended(rooms, started), 6)
    rooms.handle(Tick(), CHUNK_TIMEOUT_S)
    assert (idle.view.state, started.view.state) == (RoomState.TIMED_OUT, RoomState.SENDING)
    said = f"sent nothing after page 0 of room 1 for {CHUNK_TIMEOUT_S:.0f} s (twice waiting_s)"
    assert said in (idle.view.reason or "")
    rooms.handle(Tick(), CHUNK_TIMEOUT_S + 5)
    assert started.view.state is RoomState.TIMED_OUT


def test_pages_before_any_request_fail_the_room():
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)
    room = opened(rooms)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert room.view.state is RoomState.FAILED
