# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms whose layers go while the forward goes on: the cases that matter by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from plain_plan import AUX_NBYTES, LAYER_NBYTES, LAYERS, plan_of
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
from sglang_mooncake.layout import COMPLETION_BYTES, EVERY_LAYER, Verify, layers_from
from sglang_mooncake.messages import RoomAbort
from sglang_mooncake.rooms import prefill
from sglang_mooncake.rooms.layers import ANNOUNCED_MAX
from sglang_mooncake.rooms.prefill import (
    Aborted,
    CancelWrites,
    Chunk,
    ChunkSent,
    FellBack,
    Instruction,
    LayersFilled,
    Opened,
    Over,
    PeerLost,
    Requested,
    RoomAborted,
    Write,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S)


def filled(room: Room, pages: int, below: int, first: int = 0, add: int = 0) -> LayersFilled:
    """The pages of `chunk(pages, first)`; others with `add`."""
    return LayersFilled(room, np.arange(pages) + add, first, below, 0.0)


def writes(instructions: list[Instruction]) -> list[Write]:
    assert all(isinstance(one, Write) for one in instructions), instructions
    return [one for one in instructions if isinstance(one, Write)]


def reasons(instructions: list[Instruction]) -> list[str]:
    return [one.reason for one in instructions if isinstance(one, FellBack)]


def test_layers_go_as_they_are_filled_and_the_chunk_brings_the_rest(rooms):
    room = ready(rooms)
    said = [
        instruction
        for event in (filled(room, 2, 2), filled(room, 2, 5), ChunkSent(room, chunk(2)))
        for instruction in rooms.handle(event, 0)
    ]
    assert [(one.layers, one.early, one.pages) for one in writes(said)] == [
        (range(2), True, 2),
        (range(2, 5), True, 2),
        (layers_from(5), False, 2),
    ]
    first, second, last = writes(said)
    assert first.completion is second.completion is None
    assert (last.completion.writes, last.completion.pages, last.completion.page_layers) == (
        3,
        2,
        2 * LAYERS,
    )
    assert last.completion.nbytes == 2 * LAYERS * LAYER_NBYTES + AUX_NBYTES + COMPLETION_BYTES
    assert room.view.state is RoomState.ALL_SENT
    for _ in range(3):
        assert room.view.state is RoomState.ALL_SENT
        rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.DONE


def test_what_was_said_before_is_not_written_again(rooms):
    room = ready(rooms)
    assert len(rooms.handle(filled(room, 2, 3), 0)) == 1
    assert rooms.handle(filled(room, 2, 3), 0) == rooms.handle(filled(room, 2, 1), 0) == []
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert rooms.handle(filled(room, 2, 5), 0) == [], "its chunk was sent"


def test_each_chunk_of_a_prompt_has_its_own_layers(rooms):
    room = ready(rooms)
    assert len(rooms.handle(filled(room, 1, 4), 0)) == 1
    assert len(rooms.handle(filled(room, 1, 2, first=1, add=1), 0)) == 1, "a second forward"
    (first,) = writes(rooms.handle(ChunkSent(room, chunk(1, last=False)), 0))
    second = Chunk(np.array([1]), 1, 0, 0.0)
    (last,) = writes(rooms.handle(ChunkSent(room, second), 0))
    assert (first.layers, last.layers) == (layers_from(4), layers_from(2))
    assert first.completion is None
    assert (last.completion.writes, last.completion.pages, last.completion.page_layers) == (
        4,
        2,
        2 * LAYERS,
    )


def test_a_chunk_with_other_pages_is_written_whole_once_no_early_write_is_under_way(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 1, 4, add=7), 0)
    assert rooms.handle(ChunkSent(room, chunk(1, last=False)), 0) == []
    assert rooms.handle(ChunkSent(room, chunk(1, first=1)), 0) == [], "it does not overtake"
    assert rooms.handle(filled(room, 1, 4, first=1), 0) == [], "nor is it overtaken"
    said = rooms.handle(ended(rooms, room), 0)
    assert reasons(said) == ["a chunk was sent with other pages than were announced"]
    whole = [one for one in said if isinstance(one, Write)]
    assert [(one.layers, tuple(one.span)) for one in whole] == [
        (EVERY_LAYER, (0,)),
        (EVERY_LAYER, (1,)),
    ]
    assert room.view.state is RoomState.ALL_SENT
    for _ in whole:
        rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.DONE


def test_a_chunk_with_other_pages_goes_at_once_when_the_early_writes_have_ended(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 2, 4, add=7), 0)
    assert rooms.handle(ended(rooms, room), 0) == []
    said = rooms.handle(ChunkSent(room, chunk(2)), 0)
    assert [one.layers for one in said if isinstance(one, Write)] == [EVERY_LAYER]
    assert len(reasons(said)) == 1


@pytest.mark.parametrize("other_pages", [0, 7])
def test_digests_are_of_what_was_written_for_good(other_pages):
    """Layers that are written again, with other pages, count once."""
    rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, verify=Verify.ALL)
    room = ready(rooms)
    rooms.handle(filled(room, 2, 4, add=other_pages), 0)
    said = rooms.handle(ChunkSent(room, chunk(2)), 0)
    said += rooms.handle(ended(rooms, room), 0)
    (digest,) = [one for one in said if isinstance(one, prefill.Digest)]
    assert digest.nbytes == 2 * LAYERS * LAYER_NBYTES + AUX_NBYTES


def test_a_chunk_that_covers_two_that_were_announced_is_written_whole(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 1, 4), 0)
    rooms.handle(filled(room, 1, 4, first=1, add=1), 0)
    assert rooms.handle(ChunkSent(room, chunk(2)), 0) == []
    assert rooms.handle(ended(rooms, room), 0) == []
    (write, _) = rooms.handle(ended(rooms, room), 0)
    assert isinstance(write, Write)
    assert (write.layers, write.pages) == (EVERY_LAYER, 2)


def test_an_announcement_again_with_other_pages_goes_late(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 2, 2), 0)
    assert reasons(rooms.handle(filled(room, 2, 4, add=1), 0)) == [
        "a chunk was announced again with other pages"
    ]
    (last,) = writes(rooms.handle(ChunkSent(room, chunk(2)), 0))
    assert last.layers == layers_from(2)


def test_announcements_that_overlap_are_not_both_taken(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 2, 2), 0)
    said = rooms.handle(filled(room, 1, 2, first=1, add=1), 0)
    assert reasons(said) == ["chunks that overlap were announced"]


@pytest.mark.parametrize(
    ("end", "left"),
    [
        (lambda _, room: Aborted(room, "the client has gone"), 2),
        (lambda _, room: RoomAborted("a", RoomAbort(room.number, 1, "the client has gone")), 2),
        (lambda *_: PeerLost("a", "its link is gone"), 2),
        (lambda _, room: Opened(Room(room.number, 0.0)), 2),
        (lambda rooms, room: ended(rooms, room, "the peer has gone"), 1),
    ],
    ids=["abort", "abort of decode", "lost link", "newer request", "a write that fails"],
)
def test_a_room_that_ends_in_the_middle_of_a_forward_waits_for_its_early_writes(rooms, end, left):
    room = ready(rooms)
    rooms.handle(filled(room, 2, 2), 0)
    rooms.handle(filled(room, 2, 4), 0)
    said = rooms.handle(end(rooms, room), 0)
    (cancel,) = [one for one in said if isinstance(one, CancelWrites)]
    assert len(cancel.keys) == left
    assert room.view.exposed
    assert rooms.handle(filled(room, 2, 6), 0) == []
    assert rooms.handle(ChunkSent(room, chunk(2)), 0) == []
    for nth in range(left):
        assert room.view.state is RoomState.ENDING
        said = rooms.handle(ended(rooms, room, "cancelled"), 0)
        assert (Over(room) in said) == (nth == left - 1)
    assert room.view.over


def test_a_room_that_ends_while_a_chunk_is_held_never_writes_it(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 1, 4, add=7), 0)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    rooms.handle(Aborted(room, "the client has gone"), 0)
    assert rooms.handle(ended(rooms, room, "cancelled"), 0) == [Over(room)]


def test_every_decode_rank_gets_its_share_and_one_that_wants_nothing_gets_nothing(rooms):
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=3, share=PageShare(0, 2))), 0)
    rooms.handle(Requested("b", request(1, destinations=3, share=PageShare(1, 2))), 0)
    rooms.handle(Requested("c", nothing_wanted(1, destinations=3)), 0)
    early = writes(rooms.handle(filled(room, 2, 2), 0))
    assert [(one.peer, tuple(one.span)) for one in early] == [("a", (0,)), ("b", (1,))]
    rest = writes(rooms.handle(ChunkSent(room, chunk(2)), 0))
    assert [(one.peer, one.layers, one.completion.page_layers) for one in rest] == [
        ("a", layers_from(2), LAYERS),
        ("b", layers_from(2), LAYERS),
    ]


def test_what_cannot_go_early_goes_late_and_why_is_said(rooms):
    room = opened(rooms)
    assert rooms.handle(filled(room, 2, 2), 0) == [], "nobody has asked"
    asked = request(1)
    assert asked.target is not None
    rooms.handle(Requested("a", replace_target(asked, page_span=2)), 0)
    assert reasons(rooms.handle(filled(room, 2, 2), 0)) == [
        "decode ranks deal out the tokens of a page"
    ]
    other = ready(rooms, room=2)
    assert reasons(rooms.handle(filled(other, 3, 2), 0)) == [
        "more pages are filled than the decode side made room for"
    ]
    assert not other.view.exposed


def replace_target(asked, **changes):
    return msgspec.structs.replace(asked, target=msgspec.structs.replace(asked.target, **changes))


def test_announcements_of_a_room_are_bounded(rooms):
    room = opened(rooms)
    rooms.handle(Requested("a", request(1, pages=2 * ANNOUNCED_MAX)), 0)
    for first in range(ANNOUNCED_MAX):
        assert len(rooms.handle(filled(room, 1, 2, first=first), 0)) == 1
    assert reasons(rooms.handle(filled(room, 1, 2, first=ANNOUNCED_MAX), 0)) == [
        f"{ANNOUNCED_MAX} chunks of one request were announced and not sent"
    ]


def test_early_writes_of_all_rooms_are_bounded(rooms, monkeypatch):
    """Engine and peers take a bounded number of transfers, and refusing one would end its room."""
    monkeypatch.setattr(prefill, "EARLY_WRITES_MAX", 2)
    room = ready(rooms)
    for below in (1, 2):
        assert len(writes(rooms.handle(filled(room, 2, below), 0))) == 1
    assert reasons(rooms.handle(filled(room, 2, 3), 0)) == [
        "too many early writes of layers are under way"
    ]
    rooms.handle(ended(rooms, room), 0)
    (early,) = writes(rooms.handle(filled(room, 2, 4), 0))
    assert early.layers == range(2, 4), "those that were held back, too"
    (last,) = writes(rooms.handle(ChunkSent(room, chunk(2)), 0))
    assert last.layers == layers_from(4)
    assert (last.completion.writes, last.completion.page_layers) == (4, 2 * LAYERS)


def test_an_announcement_does_not_change_with_the_array_that_made_it(rooms):
    room = ready(rooms)
    event = filled(room, 2, 2)
    rooms.handle(event, 0)
    event.pages[:] = 9
    (last,) = writes(rooms.handle(ChunkSent(room, chunk(2)), 0))
    assert last.layers == layers_from(2)


def test_the_end_of_a_write_that_is_said_twice_counts_once(rooms):
    room = ready(rooms)
    rooms.handle(filled(room, 2, 2), 0)
    rooms.handle(ChunkSent(room, chunk(2)), 0)
    said = ended(rooms, room)
    for _ in range(2):
        assert rooms.handle(said, 0) == []
        assert room.view.state is RoomState.ALL_SENT
    assert room.view.landed_nbytes == 2 * 2 * LAYER_NBYTES
    last = ended(rooms, room)
    assert rooms.handle(last, 0) == [Over(room)]
    assert rooms.handle(last, 0) == []
    assert room.view.landed_nbytes == 2 * LAYERS * LAYER_NBYTES, "without metadata"


def test_pages_that_fit_no_plan_fail_the_room_with_the_reason(rooms):
    room = ready(rooms)
    tell, _ = rooms.handle(filled(room, 2, 2, add=-9), 0)
    assert "cannot hand over 2 pages: page -9" in tell.message.reason
    other = ready(rooms, room=2)
    rooms.handle(filled(other, 2, 2), 0)
    rooms.handle(ended(rooms, other), 0)
    rooms.handle(ChunkSent(other, Chunk(np.array([-1, 1]), 0, 0, 0.0)), 0)
    assert [one.view.state for one in (room, other)] == [RoomState.FAILED] * 2
