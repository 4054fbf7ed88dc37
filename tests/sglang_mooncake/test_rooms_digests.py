# SPDX-License-Identifier: Apache-2.0
"""Digests in the rules of both sides: who asks for them, what waits for them, what they end."""

from __future__ import annotations

import pytest
from counted_tags import CountedTags
from msgspec.structs import replace
from plain_plan import plan_of
from prefill_rooms import CHUNK_TIMEOUT_S, TIMEOUT_S, Rooms, chunk, ended, opened, request
from test_rooms_decode import DEADLINES, SLOTS, requested

from sglang_mooncake.layout import Verify
from sglang_mooncake.layout.chosen import SAMPLE_ROOMS
from sglang_mooncake.messages import RoomDiffers, RoomDigests, RoomFailed
from sglang_mooncake.rooms import decode, prefill
from sglang_mooncake.rooms.decode import (
    Aborted,
    Compare,
    DecodeRooms,
    Differs,
    Fence,
    PeerDigested,
    Verified,
)
from sglang_mooncake.rooms.prefill import (
    Broken,
    ChunkSent,
    Differed,
    Digest,
    Digested,
    LookAgain,
    Over,
    Requested,
    Tick,
    Undigested,
    Write,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

DIGESTS = RoomDigests(1, 1, Verify.ALL, seed=7)


def prefill_rooms(verify: Verify | None, random: int = 1) -> Rooms:
    return Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, verify=verify, random=lambda: random)


def sent(rooms: Rooms, wish: Verify = Verify.OFF) -> tuple[Room, list[object]]:
    """A room whose two pages are sent in two chunks to a decode rank with that wish."""
    room = opened(rooms)
    rooms.handle(Requested("a", replace(request(1), verify=wish)), 0)
    first = rooms.handle(ChunkSent(room, chunk(1, last=False)), 0)
    return room, [*first, *rooms.handle(ChunkSent(room, chunk(1, first=1)), 0)]


@pytest.mark.parametrize(
    ("ours", "theirs", "random", "is_digested"),
    [
        (Verify.OFF, Verify.OFF, 0, False),
        (Verify.OFF, Verify.ALL, 1, True),
        (Verify.ALL, Verify.OFF, 1, True),
        (Verify.SAMPLE, Verify.OFF, SAMPLE_ROOMS, True),
        (Verify.OFF, Verify.SAMPLE, SAMPLE_ROOMS, True),
        (Verify.SAMPLE, Verify.SAMPLE, SAMPLE_ROOMS + 1, False),
        (None, Verify.ALL, 0, False),
    ],
)
def test_the_stricter_wish_counts_and_the_completion_record_announces_digests(
    ours, theirs, random, is_digested
):
    _, done = sent(prefill_rooms(ours, random), theirs)
    writes = [one for one in done if isinstance(one, Write)]
    assert [one.completion and one.completion.digests for one in writes] == [None, is_digested]
    digests = [one for one in done if isinstance(one, Digest)]
    assert [one.peer for one in digests] == ["a"] * is_digested
    assert [one.verify for one in digests] == [max(ours or 0, theirs)] * is_digested


@pytest.mark.parametrize("first", ["the writes", "the digests"])
def test_a_prefill_room_is_done_once_its_writes_and_its_digests_are(first):
    rooms = prefill_rooms(Verify.ALL)
    room, _ = sent(rooms)
    for what in (first, *({"the writes", "the digests"} - {first})):
        assert room.view.state is RoomState.ALL_SENT
        if what == "the digests":
            done = rooms.handle(Digested(room, "a", DIGESTS), 0)
            assert done[0] == prefill.Tell("a", DIGESTS)
        else:
            rooms.handle(ended(rooms, room), 0)
            rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.DONE
    assert rooms.handle(Digested(room, "a", DIGESTS), 0) == [], "said before"


def test_digests_that_could_not_be_made_fail_the_room_and_tell_who_waits_for_them():
    rooms = prefill_rooms(Verify.ALL)
    room, _ = sent(rooms)
    done = rooms.handle(Digested(room, "a", None, "the device is lost"), 0)
    told = next(one.message for one in done if isinstance(one, prefill.Tell))
    assert isinstance(told, RoomFailed)
    assert "no digest of what was sent: the device is lost" in told.reason
    assert room.view.state is RoomState.ENDING, "writes are under way"
    rooms.handle(ended(rooms, room), 0)
    rooms.handle(ended(rooms, room), 0)
    assert room.view.state is RoomState.FAILED


def test_one_of_a_sample_arrives_without_digests_if_none_could_be_made():
    rooms = prefill_rooms(Verify.SAMPLE, random=SAMPLE_ROOMS)
    room, _ = sent(rooms)
    rooms.handle(ended(rooms, room), 0)
    rooms.handle(ended(rooms, room), 0)
    told, over = rooms.handle(Digested(room, "a", None, "the device is lost"), 0)
    message = RoomDigests(1, request(1).generation, Verify.SAMPLE, failure="the device is lost")
    assert told == prefill.Tell("a", message)
    assert isinstance(over, Over)
    assert room.view.state is RoomState.DONE


@pytest.mark.parametrize("failure", [None, "the device is lost"])
def test_a_room_that_ends_badly_keeps_its_pages_until_nobody_reads_them(failure):
    rooms = prefill_rooms(Verify.ALL)
    room, _ = sent(rooms)
    rooms.handle(ended(rooms, room), 0)
    rooms.handle(ended(rooms, room), 0)
    rooms.handle(Broken(room, "because"), 0)
    assert room.view.state is RoomState.ENDING
    (over,) = rooms.handle(Digested(room, "a", None, failure), 0)
    assert isinstance(over, Over)
    assert (room.view.state, room.view.reason) == (RoomState.FAILED, "because")


def test_digests_that_come_when_the_room_is_ending_are_told_to_nobody():
    rooms = prefill_rooms(Verify.ALL)
    room, _ = sent(rooms)
    rooms.handle(Broken(room, "because"), 0)
    assert rooms.handle(Digested(room, "a", DIGESTS), 0) == []


DIGEST_S = CHUNK_TIMEOUT_S / 4


@pytest.mark.parametrize("verify", [Verify.SAMPLE, Verify.ALL])
@pytest.mark.parametrize("is_ending", [False, True])
def test_a_room_whose_digests_never_come_keeps_its_pages_for_a_time(verify, is_ending):
    rooms = prefill_rooms(verify, random=SAMPLE_ROOMS)
    room, _ = sent(rooms)
    rooms.handle(ended(rooms, room), 0)
    rooms.handle(ended(rooms, room), 0)
    if is_ending:
        rooms.handle(Broken(room, "because"), 0)
    assert rooms.handle(Tick(), DIGEST_S - 0.1) == []
    said, *told, over = rooms.handle(Tick(), DIGEST_S)
    assert isinstance(said, Undigested)
    assert said.reason.startswith("not made within 10 s (half of waiting_s): the thread that")
    assert isinstance(over, Over)
    if is_ending:
        assert not told
        assert (room.view.state, room.view.reason) == (RoomState.FAILED, "because")
    elif verify is Verify.ALL:
        assert isinstance(told[0].message, RoomFailed)
        assert (room.view.state, room.view.reason) == (
            RoomState.FAILED,
            f"no digest of what was sent: {said.reason}",
        )
    else:
        assert told[0].message.failure == said.reason
        assert room.view.state is RoomState.DONE
    assert len(told) == (not is_ending)
    assert rooms.handle(Digested(room, "a", DIGESTS), DIGEST_S) == [], "too late"


def test_digests_that_come_too_late_end_no_write():
    """It has a deadline of its own, in the engine."""
    rooms = prefill_rooms(Verify.SAMPLE, random=SAMPLE_ROOMS)
    room, _ = sent(rooms)
    rooms.handle(Tick(), DIGEST_S)
    assert room.view.state is RoomState.ALL_SENT
    assert rooms.handle(Tick(), 10 * DIGEST_S) == []
    rooms.handle(ended(rooms, room), DIGEST_S)
    rooms.handle(ended(rooms, room), DIGEST_S)
    assert room.view.state is RoomState.DONE


def test_memory_is_looked_at_again_though_the_room_is_over():
    differs = RoomDiffers(1, 1, ())
    assert prefill_rooms(Verify.ALL).handle(Differed("a", differs), 0) == [LookAgain("a", differs)]


# --- decode ---


def decode_rooms(verify: Verify = Verify.ALL) -> DecodeRooms:
    return DecodeRooms(DEADLINES, SLOTS, 100, CountedTags(200), verify=verify)


def digests_of(room: Room) -> RoomDigests:
    return RoomDigests(room.number, room.view.generation, Verify.ALL, 7)


def test_a_decode_rank_asks_for_digests_and_compares_those_that_come_once():
    rooms = decode_rooms()
    room = requested(rooms)
    (expected,) = room.view.expected
    assert expected.digests == 1
    message = digests_of(room)
    (compare,) = rooms.handle(PeerDigested("p0", message), 0)
    assert isinstance(compare, Compare)
    assert (compare.room, compare.link, compare.message) == (room, "p0", message)
    assert (compare.expected, compare.request.verify) == (expected, Verify.ALL)
    assert rooms.handle(PeerDigested("p0", message), 0) == [], "said before"
    assert rooms.handle(Verified(room, expected.tag, None), 0) == []
    assert room.view.verified == {expected.tag}


@pytest.mark.parametrize("verify", [Verify.OFF, Verify.SAMPLE])
def test_digests_that_were_not_asked_for_are_compared_too(verify):
    rooms = decode_rooms(verify)
    room = requested(rooms)
    assert room.view.expected[0].digests == 0
    assert rooms.handle(PeerDigested("p0", digests_of(room)), 0)


def test_digests_of_another_room_or_from_somebody_else_are_left_alone():
    rooms = decode_rooms()
    room = requested(rooms)
    message = digests_of(room)
    for link, other in (
        ("p1", message),
        ("p0", replace(message, room=2)),
        ("p0", replace(message, generation=message.generation + 1)),
    ):
        assert rooms.handle(PeerDigested(link, other), 0) == []


def test_what_differs_fails_the_room_behind_its_fence():
    rooms = decode_rooms()
    room = requested(rooms)
    fence, tell = rooms.handle(Verified(room, room.view.expected[0].tag, "page 3 differs"), 0)
    assert isinstance(fence, Fence)
    assert isinstance(tell, decode.Tell)
    assert room.view.reason == "page 3 differs"
    assert not room.view.verified


def test_the_source_of_what_differs_is_told_and_the_room_goes_on():
    rooms = decode_rooms()
    room = requested(rooms)
    tell = decode.Tell("p0", RoomDiffers(room.number, room.view.generation, ()))
    assert rooms.handle(Differs(room, tell), 0) == [tell]
    assert not room.view.decided
    rooms.handle(Aborted(room, "the client has left"), 0)
    assert rooms.handle(Differs(room, tell), 0) == []


def test_what_is_compared_too_late_changes_nothing():
    rooms = decode_rooms()
    room = requested(rooms)
    message, tag = digests_of(room), room.view.expected[0].tag
    rooms.handle(Aborted(room, "the client has left"), 0)
    assert rooms.handle(PeerDigested("p0", message), 0) == []
    assert rooms.handle(Verified(room, tag, "page 3 differs"), 0) == []
    assert room.view.reason == "the client has left"
