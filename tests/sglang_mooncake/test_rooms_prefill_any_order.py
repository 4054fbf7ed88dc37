# SPDX-License-Identifier: Apache-2.0
"""Prefill rooms: anything at all in any order."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plain_plan import LAYERS, places_of, plan_of
from prefill_rooms import (
    CHUNK_TIMEOUT_S,
    TIMEOUT_S,
    Rooms,
    chunk,
    nothing_wanted,
    request,
)

from bootstrap_server.ranks.matching import ALL_PAGES, PageShare
from sglang_mooncake.layout import COMPLETION_BYTES
from sglang_mooncake.messages import RoomAbort, RoomRequest, RoomWait
from sglang_mooncake.rooms.prefill import (
    Aborted,
    AwaitEvents,
    CancelWrites,
    Chunk,
    ChunkSent,
    Closed,
    Computed,
    EventsHappened,
    LayersFilled,
    Opened,
    Over,
    PeerLost,
    Requested,
    RoomAborted,
    Tick,
    WaitsForPrompt,
    Write,
    WriteEnded,
)
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import ENDS, RoomState

#: Opaque to the rules.
EVENTS = (object(),)


def _differ(one: Write, other: Write) -> bool:
    """Whether they bring other pages to one place."""
    mine, theirs = places_of(one), places_of(other)
    return any(mine[place] != theirs[place] for place in mine.keys() & theirs.keys())


class AnyOrder(RuleBasedStateMachine):
    """Whatever comes in whatever order: no exception, no forgotten write, no end that changes."""

    @initialize(computed_first=st.booleans())
    def start(self, computed_first):
        self.rooms = Rooms(plan_of, TIMEOUT_S, CHUNK_TIMEOUT_S, computed_first)
        self.now_s = 0.0
        self.uses: list[Room] = []
        self.outstanding: dict[int, list[Write]] = {}
        #: By room and peer: (position, layer) → the page that was last written there.
        self.written: defaultdict[tuple[int, str], dict[tuple[int, int], int]] = defaultdict(dict)
        self.nbytes: Counter[tuple[int, str]] = Counter()
        self.writes: Counter[tuple[int, str]] = Counter()
        self.ends: dict[int, tuple[RoomState, str | None]] = {}
        self.generation = 0
        self.over: list[Room] = []
        self.gpu: list[Room] = []  # whose events have yet to happen, once for each wait
        self.asked: list[tuple[str, RoomRequest]] = []

    def do(self, event):
        for instruction in self.rooms.handle(event, self.now_s):
            if isinstance(instruction, Write):
                self.write(instruction)
            if isinstance(instruction, AwaitEvents):
                self.gpu.append(instruction.room)
            if isinstance(instruction, Over):
                self.over.append(instruction.room)
            if isinstance(instruction, CancelWrites):
                under_way = self.outstanding[instruction.room.serial]
                assert set(instruction.keys) == {write.key for write in under_way}

    def write(self, write: Write) -> None:
        serial = write.room.serial
        under_way = self.outstanding.setdefault(serial, [])
        for other in under_way:
            assert other.peer != write.peer or not _differ(other, write), "they could overtake"
        under_way.append(write)
        which = serial, write.peer
        self.written[which] |= places_of(write)
        self.nbytes[which] += write.blocks.total_nbytes
        self.writes[which] += 1
        assert write.nth == self.writes[which]
        if write.completion is not None:
            asked = write.target.num_pages
            share = write.target.share.bounds(asked)
            places = {(at, layer) for at in share for layer in range(LAYERS)}
            assert self.written[which].keys() >= places, "all sent with a layer of a page missing"
            assert (write.completion.writes, write.completion.pages) == (write.nth, len(share))
            assert write.completion.page_layers == len(places)
            assert write.completion.nbytes == self.nbytes[which] + COMPLETION_BYTES

    @rule(room=st.integers(1, 3))
    def open(self, room):
        use = Room(room, self.now_s)
        self.uses.append(use)
        self.do(Opened(use))

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

    @rule(room=st.integers(1, 3), peer=st.sampled_from("ab"), asks=st.booleans())
    def wait(self, room, peer, asks):
        """For the prompt; perhaps the request of that generation is on its way already."""
        self.generation += 1
        self.do(WaitsForPrompt(peer, RoomWait(room, self.generation)))
        if asks:
            self.asked.append((peer, request(room, self.generation)))

    @rule(data=st.data())
    def compute(self, data):
        if self.uses:
            self.do(Computed(data.draw(st.sampled_from(self.uses))))

    @rule(data=st.data())
    def ask_again(self, data):
        if self.asked:
            self.do(Requested(*data.draw(st.sampled_from(self.asked))))

    @rule(
        data=st.data(),
        pages=st.integers(0, 2),
        first=st.integers(0, 2),
        last=st.booleans(),
        events=st.sampled_from([(), (), EVENTS]),
    )
    def send(self, data, pages, first, last, events):
        if self.uses:
            room = data.draw(st.sampled_from(self.uses))
            self.do(ChunkSent(room, chunk(pages, first, last), events))

    @rule(
        data=st.data(),
        pages=st.integers(1, 2),
        first=st.integers(0, 2),
        below=st.integers(0, LAYERS - 1),
        add=st.sampled_from([0, 0, 5]),
        events=st.sampled_from([(), (), EVENTS]),
    )
    def fill(self, data, pages, first, below, add, events):
        """Of the pages that `send` names, or of others."""
        if self.uses:
            room = data.draw(st.sampled_from(self.uses))
            self.do(LayersFilled(room, np.arange(pages) + add, first, below, 0.0, events))

    @rule(data=st.data(), failure=st.sampled_from([None, None, "broken"]))
    def gpu_happens(self, data, failure):
        """Also in a room that has ended meanwhile."""
        if self.gpu:
            room = self.gpu.pop(data.draw(st.integers(0, len(self.gpu) - 1)))
            self.do(EventsHappened(room, failure))

    @rule(data=st.data(), failure=st.sampled_from([None, None, "broken"]))
    def write_ends(self, data, failure):
        under_way = [v for v in self.uses if self.outstanding.get(v.serial)]
        if under_way:
            room = data.draw(st.sampled_from(under_way))
            writes = self.outstanding[room.serial]
            write = writes.pop(data.draw(st.integers(0, len(writes) - 1)))
            self.do(WriteEnded(room, write.peer, write.nth, failure))

    @rule(data=st.data(), close=st.booleans())
    def give_up(self, data, close):
        if self.uses:
            room = data.draw(st.sampled_from(self.uses))
            self.do(Closed(room) if close else Aborted(room, "gone"))

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
        for room in self.uses:
            if room.view.state in ENDS:
                assert not self.outstanding.get(room.serial), "an end while bytes still move"
                end = (room.view.state, room.view.reason)
                assert self.ends.setdefault(room.serial, end) == end
                assert (room.view.reason is None) == (room.view.state is RoomState.DONE)
            if room.view.state is RoomState.ENDING:
                assert self.outstanding[room.serial], "an ending that nothing will end"

    @invariant()
    def what_is_early_is_counted(self):
        early = self.rooms._requests._early
        kept = [one for peer in early._peers.values() for one in peer.messages.values()]
        assert early.nbytes == sum(one.nbytes for one in kept)
        assert {(one.peer, one.message.room) for one in kept} == {
            (peer, room) for room, peers in early._rooms.items() for peer in peers
        }

    @invariant()
    def what_waits_is_counted(self):
        said = [len(record.said) for record in self.rooms._table]
        assert self.rooms._table.waiting == sum(said)

    @invariant()
    def the_table_holds_live_rooms_alone(self):
        assert len(self.rooms) == sum(not room.view.over for room in self.uses)
        assert {room.serial for room in self.over} == {v.serial for v in self.uses if v.view.over}
        assert len(self.over) == len({room.serial for room in self.over})


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_any_order = pytest.mark.slow(AnyOrder.TestCase)


fills = st.tuples(
    st.just("fill"), st.integers(0, 2), st.integers(0, LAYERS - 1), st.sampled_from([0, 0, 0, 5])
)
sends = st.tuples(st.just("send"), st.integers(1, 2))
ends = st.tuples(st.just("end"), st.integers(0, 3))


@pytest.mark.slow
@given(st.lists(st.one_of(fills, sends, ends), max_size=12))
@settings(max_examples=400)
def test_layers_of_one_prompt_in_any_order(steps):
    """Two chunks of one page or one of two, with whatever is announced: the completion record is
    exact, and the room is done."""
    machine = AnyOrder()
    machine.start(computed_first=False)
    machine.open(1)
    (room,) = machine.uses
    machine.do(Requested("a", request(1)))
    sent = 0

    def send(pages: int) -> int:
        stop = min(sent + pages, 2)
        numbers = np.arange(sent, stop)
        machine.do(ChunkSent(room, Chunk(numbers, sent, 0 if stop == 2 else None, 0.0)))
        return stop

    def end(nth: int) -> None:
        writes = machine.outstanding.get(room.serial)
        if writes:
            write = writes.pop(nth % len(writes))
            machine.do(WriteEnded(room, write.peer, write.nth, None))

    for step in steps:
        match step:
            case "fill", first, below, add:
                pages = np.arange(first % 2, 2 if first < 2 else 1 + first % 2) + add
                machine.do(LayersFilled(room, pages, first % 2, below, 0.0))
            case "send", pages if sent < 2:
                sent = send(pages)
            case "end", nth:
                end(nth)
    if sent < 2:
        send(2)
    while machine.outstanding.get(room.serial):
        end(0)
    assert room.view.state is RoomState.DONE, room.view.reason
