# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms: the cases that matter by name, then anything at all in any order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bootstrap_server.matching import ALL_PAGES, PageShare
from sglang_mooncake.messages import REASON_CHARS_MAX, RoomAbort, RoomRequest, Target
from sglang_mooncake.rooms import early
from sglang_mooncake.rooms.early import EARLY_PEER_BYTES_MAX
from sglang_mooncake.rooms.prefill import (
    ABORT_GRACE_S,
    Aborted,
    CancelWrites,
    Chunk,
    ChunkSent,
    Closed,
    Opened,
    Over,
    PeerLost,
    PrefillRooms,
    Requested,
    RoomAborted,
    Tell,
    Tick,
    Write,
    WriteEnded,
)
from sglang_mooncake.rooms.states import ENDS, RoomState, RoomView

TIMEOUT_S, CHUNK_TIMEOUT_S = 10.0, 40.0


def target(tag: int = 1, pages: int = 2, share: PageShare = ALL_PAGES) -> Target:
    indices = np.arange(pages, dtype="<i4").tobytes()
    return Target(tag, pages, indices, share, states=(), aux_slot=0, seal_slot=0)


def request(
    room: int,
    generation: int = 1,
    pages: int = 2,
    destinations: int = 1,
    share: PageShare = ALL_PAGES,
    prefix: int = 3,
) -> RoomRequest:
    wanted = target(generation, pages, share)
    return RoomRequest(room, generation, prefix, destinations, wanted)


def nothing_wanted(room: int, generation: int = 1, destinations: int = 1) -> RoomRequest:
    return RoomRequest(room, generation, 3, destinations, target=None)


def chunk(pages: int, first: int = 0, last: bool = True) -> Chunk:
    return Chunk(np.arange(pages), first, 0 if last else None, 0.0)


def opened(rooms: PrefillRooms, room: int = 1, now_s: float = 0.0) -> RoomView:
    view = RoomView(room, now_s)
    rooms.handle(Opened(view), now_s)
    return view


def ready(rooms: PrefillRooms, room: int = 1) -> RoomView:
    view = opened(rooms, room)
    rooms.handle(Requested("a", request(room)), 0)
    assert view.state is RoomState.READY
    return view


def test_a_room_goes_from_open_to_done():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    assert view.decode_prefix_len == 3
    (first,) = rooms.handle(ChunkSent(view, chunk(1, last=False)), 0)
    (second,) = rooms.handle(ChunkSent(view, chunk(1, first=1)), 0)
    assert isinstance(first, Write)
    assert isinstance(second, Write)
    assert (first.sent.writes, second.sent.writes) == (1, 2)
    assert view.state is RoomState.SEALED
    assert rooms.handle(WriteEnded(view, None), 0) == []
    assert view.state is RoomState.SEALED
    rooms.handle(WriteEnded(view, None), 0)
    assert view.state is RoomState.DONE
    assert rooms.handle(Closed(view), 0) == []
    assert len(rooms) == 0


def test_a_room_with_several_decode_ranks_waits_for_all_and_writes_to_each():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=2)), 0)
    assert view.state is RoomState.OPEN
    rooms.handle(Requested("b", request(1, destinations=2)), 0)
    writes = rooms.handle(ChunkSent(view, chunk(2)), 0)
    assert [w.peer for w in writes if isinstance(w, Write)] == ["a", "b"]


def test_decode_ranks_that_disagree_on_their_number_fail_the_room():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=3)), 0)
    tells = rooms.handle(Requested("b", request(1, destinations=2)), 0)
    assert [i.peer for i in tells if isinstance(i, Tell)] == ["a", "b"]
    assert view.state is RoomState.FAILED
    assert "[2, 3]" in (view.reason or "")


def test_decode_ranks_that_hold_different_prefixes_fail_the_room():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=2, prefix=0)), 0)
    tells = rooms.handle(Requested("b", request(1, destinations=2, prefix=16)), 0)
    assert [i.peer for i in tells if isinstance(i, Tell)] == ["a", "b"]
    assert view.state is RoomState.FAILED
    assert "[0, 16]" in (view.reason or "")


def test_a_decode_rank_too_many_is_left_for_the_next_use_of_the_room_number():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    assert rooms.handle(Requested("c", request(1, destinations=1)), 0) == []
    assert view.state is RoomState.READY
    writes = rooms.handle(ChunkSent(view, chunk(2)), 0)
    assert [write.peer for write in writes if isinstance(write, Write)] == ["a", "b"]
    again = opened(rooms)
    assert again.state is RoomState.READY


def test_a_rank_that_sends_no_byte_is_done_with_its_last_chunk():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", nothing_wanted(1)), 0)
    assert view.state is RoomState.READY
    assert view.decode_prefix_len == 3
    assert rooms.handle(ChunkSent(view, chunk(1, last=False)), 0) == []
    assert view.state is RoomState.SENDING
    assert rooms.handle(ChunkSent(view, chunk(4, first=1)), 0) == [Over(view)]
    assert view.state is RoomState.DONE


def test_a_rank_writes_to_those_alone_who_want_something_of_it():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", nothing_wanted(1, destinations=2)), 0)
    assert view.state is RoomState.OPEN
    rooms.handle(Requested("b", request(1, destinations=2)), 0)
    (write,) = rooms.handle(ChunkSent(view, chunk(2)), 0)
    assert isinstance(write, Write)
    assert write.peer == "b"
    rooms.handle(WriteEnded(view, None), 0)
    assert view.state is RoomState.DONE


def test_a_rank_with_a_share_of_the_pages_writes_these_and_counts_only_its_own_writes():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, pages=6, share=PageShare(1, 3))), 0)
    spans = []
    for first, last in ((0, False), (2, False), (4, True)):
        for write in rooms.handle(ChunkSent(view, chunk(2, first, last)), 0):
            assert isinstance(write, Write)
            spans.append((write.span, write.sent.writes))
    assert spans == [(range(2, 4), 1), (range(4, 4), 2)], "the last one carries the seal"


def test_a_decode_rank_that_is_lost_fails_the_room_for_the_others_too():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    rooms.handle(ChunkSent(view, chunk(2)), 0)
    tell, cancel = rooms.handle(PeerLost("a", "gone"), 0)
    assert isinstance(tell, Tell)
    assert tell.peer == "b"
    assert cancel == CancelWrites(view)
    rooms.handle(WriteEnded(view, "cancelled"), 0)
    assert view.state is RoomState.ENDING, "one write still reads the pages"
    rooms.handle(WriteEnded(view, None), 0)
    assert view.state is RoomState.FAILED


def test_a_room_that_some_asked_for_times_out_with_their_number():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, destinations=4)), 0)
    (tell, _) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell, Tell)
    assert "1 of 4 decode ranks asked for room 1" in (view.reason or "")


def test_an_early_abort_of_one_rank_outlives_the_early_request_of_another():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("b", RoomAbort(1, 0, "no link to its other source")), 0)
    rooms.handle(Requested("a", request(1, generation=9, destinations=2)), 0)
    view = opened(rooms)
    assert view.state is RoomState.OPEN, "the other rank may have asked again, on its way here"
    (tell, _) = rooms.handle(Tick(), ABORT_GRACE_S)
    assert view.state is RoomState.ABORTED
    assert isinstance(tell, Tell)
    assert (tell.peer, tell.message.generation) == ("a", 9)


def test_a_lost_peer_takes_its_early_request_along_and_leaves_that_of_others():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    for peer in "ab":
        rooms.handle(Requested(peer, request(1, destinations=2)), 0)
    rooms.handle(PeerLost("a", "gone"), 0)
    view = opened(rooms)
    assert view.state is RoomState.OPEN
    rooms.handle(Requested("c", request(1, destinations=2)), 0)
    assert view.state is RoomState.READY


def test_an_early_request_is_kept_for_its_room():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("a", request(1)), 0)
    assert opened(rooms).state is RoomState.READY


def test_an_early_request_is_refused_when_its_room_never_comes():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("a", request(1, generation=5)), 0)
    assert rooms.handle(Tick(), TIMEOUT_S - 0.1) == []
    (tell,) = rooms.handle(Tick(), TIMEOUT_S)
    assert isinstance(tell, Tell)
    assert (tell.peer, tell.message.room, tell.message.generation) == ("a", 1, 5)
    assert "no request with this room" in tell.message.reason


def early_bytes(rooms: PrefillRooms) -> int:
    return rooms._early.nbytes


def test_what_one_peer_says_early_is_bounded_and_its_oldest_request_is_told():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    assert rooms.handle(Requested("b", request(1_000)), 0) == []
    pages = EARLY_PEER_BYTES_MAX // 4 // 4
    told = [rooms.handle(Requested("a", request(room, pages=pages)), 0) for room in range(5)]
    assert told[:3] == [[], [], []], "the fourth and its overhead are too much"
    for room, (tell,) in enumerate(told[3:]):
        assert isinstance(tell, Tell)
        assert (tell.peer, tell.message.room) == ("a", room)
        assert "more rooms, or name more pages" in tell.message.reason
    assert early_bytes(rooms) <= EARLY_PEER_BYTES_MAX + 5_000
    assert opened(rooms, 1_000).state is RoomState.READY, "nobody else gives way"


def test_what_all_peers_say_early_is_bounded_and_who_has_most_gives_way(monkeypatch):
    monkeypatch.setattr(early, "EARLY_BYTES_MAX", 10_000)
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(Requested("b", request(1, pages=0)), 0)
    for room in range(100, 200):
        rooms.handle(RoomAborted("a", RoomAbort(room, 1, "never was one")), 0)
    assert early_bytes(rooms) <= 10_000
    assert opened(rooms, 1).state is RoomState.READY


def test_aborts_of_unknown_rooms_with_long_reasons_take_little_memory():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    for room in range(300):
        rooms.handle(RoomAborted("a", RoomAbort(room, 1, "x" * 2_000_000)), 0)
    assert early_bytes(rooms) < 300 * 6_000
    assert sum(
        len(one.message.reason) for room in range(300) for one in rooms._early.take(room)
    ) == (300 * REASON_CHARS_MAX)
    assert early_bytes(rooms) == 0


def test_an_early_abort_ends_the_room_unless_the_peer_asks_again():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    for room in (1, 2):
        rooms.handle(RoomAborted("a", RoomAbort(room, 4, "client gone")), 0)
    view, reused = opened(rooms, 1), opened(rooms, 2)
    rooms.handle(Requested("a", request(2, generation=5)), 1)
    assert reused.state is RoomState.READY
    rooms.handle(Tick(), ABORT_GRACE_S - 0.1)
    assert view.state is RoomState.OPEN
    rooms.handle(Tick(), ABORT_GRACE_S)
    assert view.state is RoomState.ABORTED
    assert "client gone" in (view.reason or "")
    assert reused.state is RoomState.READY


def test_an_abort_that_overtook_its_request_wins():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("a", RoomAbort(1, 4, "client gone")), 0)
    rooms.handle(Requested("a", request(1, generation=4)), 0)
    view = opened(rooms)
    rooms.handle(Requested("a", request(1, generation=4)), 0)
    assert view.state is RoomState.ABORTED


def test_a_newer_request_outlives_an_older_abort():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    rooms.handle(RoomAborted("a", RoomAbort(1, 4, "client gone")), 0)
    rooms.handle(Requested("a", request(1, generation=5)), 0)
    assert opened(rooms).state is RoomState.READY


@pytest.mark.parametrize("when", ["before the number is used again", "after"])
def test_a_late_abort_of_a_former_use_ends_no_later_one(when):
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    rooms.handle(ChunkSent(former, chunk(2)), 0)
    rooms.handle(WriteEnded(former, None), 0)
    assert former.state is RoomState.DONE
    if when == "after":
        view = opened(rooms)
    rooms.handle(RoomAborted("a", RoomAbort(1, 1, "client gone")), 0)
    if when != "after":
        view = opened(rooms)
    rooms.handle(Tick(), TIMEOUT_S - 1)
    assert view.state is RoomState.OPEN
    rooms.handle(Requested("a", request(1, generation=2)), TIMEOUT_S - 1)
    assert view.state is RoomState.READY


def test_an_abort_of_an_early_request_is_not_lost_on_a_room_in_use():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    ready(rooms)
    rooms.handle(Requested("a", request(1, generation=2)), 0)
    rooms.handle(RoomAborted("a", RoomAbort(1, 2, "client gone")), 0)
    again = opened(rooms)
    assert again.state is RoomState.OPEN
    rooms.handle(Tick(), ABORT_GRACE_S)
    assert again.state is RoomState.ABORTED


def test_a_request_that_comes_twice_opens_no_later_use_of_its_room_number():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    rooms.handle(Aborted(former, "client gone"), 0)
    again = opened(rooms)
    assert rooms.handle(Requested("a", request(1)), 0) == []
    assert again.state is RoomState.OPEN


def test_an_abort_with_writes_under_way_waits_until_they_have_ended():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    rooms.handle(ChunkSent(view, chunk(2)), 0)
    told = rooms.handle(Aborted(view, "client gone"), 0)
    assert [type(i) for i in told] == [Tell, CancelWrites]
    assert view.state is RoomState.ENDING
    rooms.handle(WriteEnded(view, "cancelled"), 0)
    assert view.state is RoomState.ABORTED
    assert view.reason == "client gone"


def test_a_failed_write_fails_the_room_and_tells_the_decode_rank():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    rooms.handle(ChunkSent(view, chunk(2)), 0)
    (tell, *_) = rooms.handle(WriteEnded(view, "peer frozen"), 0)
    assert isinstance(tell, Tell)
    assert tell.message.reason == "prefill side: peer frozen"
    assert view.state is RoomState.FAILED


def test_a_lost_peer_fails_its_rooms_and_is_not_told():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view, other = ready(rooms), opened(rooms, 2)
    assert rooms.handle(PeerLost("a", "gone"), 0) == [Over(view)]
    assert view.state is RoomState.FAILED
    assert other.state is RoomState.OPEN


def test_opening_a_room_number_again_supersedes_its_former_use():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    former = ready(rooms)
    again = opened(rooms)
    assert former.state is RoomState.SUPERSEDED
    assert again.state is RoomState.OPEN
    rooms.handle(Requested("a", request(1, generation=2)), 0)
    assert again.state is RoomState.READY


def test_a_repeated_request_changes_nothing():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    assert rooms.handle(Requested("a", request(1)), 0) == []
    assert view.state is RoomState.READY


@pytest.mark.parametrize("bad", [chunk(3), chunk(1), chunk(3, last=False)], ids=str)
def test_chunks_that_do_not_fit_the_request_fail_the_room(bad):
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    rooms.handle(ChunkSent(view, bad), 0)
    assert view.state is RoomState.FAILED
    assert "--page-size" in (view.reason or "")


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
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = ready(rooms)
    for one in chunks[:-1]:
        rooms.handle(ChunkSent(view, one), 0)
    tell, *_ = rooms.handle(ChunkSent(view, chunks[-1]), 0)
    assert isinstance(tell, Tell)
    assert "a chunk was lost or overtaken" in tell.message.reason
    assert view.end is RoomState.FAILED


def test_a_scheduler_that_sends_nothing_more_ends_the_room():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    idle, started = ready(rooms, 1), ready(rooms, 2)
    rooms.handle(ChunkSent(started, chunk(1, last=False)), 5)
    rooms.handle(WriteEnded(started, None), 6)
    rooms.handle(Tick(), CHUNK_TIMEOUT_S)
    assert (idle.state, started.state) == (RoomState.TIMED_OUT, RoomState.SENDING)
    assert "sent nothing after page 0 of room 1" in (idle.reason or "")
    rooms.handle(Tick(), CHUNK_TIMEOUT_S + 5)
    assert started.state is RoomState.TIMED_OUT


def test_pages_before_any_request_fail_the_room():
    rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
    view = opened(rooms)
    rooms.handle(ChunkSent(view, chunk(2)), 0)
    assert view.state is RoomState.FAILED


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: no exception, no forgotten write, no end that changes."""

    @initialize()
    def start(self):
        self.rooms = PrefillRooms(TIMEOUT_S, CHUNK_TIMEOUT_S)
        self.now_s = 0.0
        self.views: list[RoomView] = []
        self.outstanding: dict[int, int] = {}
        self.ends: dict[int, tuple[RoomState, str | None]] = {}
        self.generation = 0
        self.over: list[RoomView] = []
        self.asked: list[tuple[str, RoomRequest]] = []

    def do(self, event):
        for instruction in self.rooms.handle(event, self.now_s):
            if isinstance(instruction, Write):
                serial = instruction.view.serial
                self.outstanding[serial] = self.outstanding.get(serial, 0) + 1
            if isinstance(instruction, Over):
                self.over.append(instruction.view)
            if isinstance(instruction, CancelWrites):
                assert self.outstanding[instruction.view.serial]

    @rule(room=st.integers(1, 3))
    def open(self, room):
        view = RoomView(room, self.now_s)
        self.views.append(view)
        self.do(Opened(view))

    @rule(
        room=st.integers(1, 3),
        peer=st.sampled_from("ab"),
        destinations=st.integers(1, 2),
        share=st.sampled_from([None, ALL_PAGES, PageShare(0, 2), PageShare(1, 2)]),
    )
    def ask(self, room, peer, destinations, share):
        self.generation += 1
        asked = nothing_wanted(room, self.generation, destinations)
        if share is not None:
            asked = request(room, self.generation, destinations=destinations, share=share)
        self.asked.append((peer, asked))
        self.do(Requested(peer, asked))

    @rule(data=st.data())
    def ask_again(self, data):
        if self.asked:
            self.do(Requested(*data.draw(st.sampled_from(self.asked))))

    @rule(data=st.data(), pages=st.integers(0, 2), first=st.integers(0, 2), last=st.booleans())
    def send(self, data, pages, first, last):
        if self.views:
            view = data.draw(st.sampled_from(self.views))
            self.do(ChunkSent(view, chunk(pages, first, last)))

    @rule(data=st.data(), failure=st.sampled_from([None, "broken"]))
    def write_ends(self, data, failure):
        under_way = [v for v in self.views if self.outstanding.get(v.serial)]
        if under_way:
            view = data.draw(st.sampled_from(under_way))
            self.outstanding[view.serial] -= 1
            self.do(WriteEnded(view, failure))

    @rule(data=st.data(), close=st.booleans())
    def give_up(self, data, close):
        if self.views:
            view = data.draw(st.sampled_from(self.views))
            self.do(Closed(view) if close else Aborted(view, "gone"))

    @rule(room=st.integers(1, 3), peer=st.sampled_from("ab"), back=st.integers(0, 2))
    def peer_aborts(self, room, peer, back):
        self.do(RoomAborted(peer, RoomAbort(room, max(0, self.generation - back), "gone")))

    @rule(peer=st.sampled_from("ab"))
    def lose(self, peer):
        self.do(PeerLost(peer, "lost"))

    @rule(elapsed_s=st.floats(0, 20))
    def tick(self, elapsed_s):
        self.now_s += elapsed_s
        self.do(Tick())

    @invariant()
    def ends_are_final_and_quiet(self):
        for view in self.views:
            if view.state in ENDS:
                assert not self.outstanding.get(view.serial), "an end while bytes still move"
                end = (view.state, view.reason)
                assert self.ends.setdefault(view.serial, end) == end
                assert (view.reason is None) == (view.state is RoomState.DONE)
            if view.state is RoomState.ENDING:
                assert self.outstanding[view.serial], "an ending that nothing will end"

    @invariant()
    def what_is_early_is_counted(self):
        kept = [
            early for peer in self.rooms._early._peers.values() for early in peer.messages.values()
        ]
        assert self.rooms._early.nbytes == sum(one.nbytes for one in kept)
        assert {(one.peer, one.message.room) for one in kept} == {
            (peer, room) for room, peers in self.rooms._early._rooms.items() for peer in peers
        }

    @invariant()
    def the_table_holds_live_rooms_alone(self):
        assert len(self.rooms) == sum(not view.over for view in self.views)
        assert {view.serial for view in self.over} == {v.serial for v in self.views if v.over}
        assert len(self.over) == len({view.serial for view in self.over})


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_any_order = AnyOrder.TestCase
