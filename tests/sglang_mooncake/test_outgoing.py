# SPDX-License-Identifier: Apache-2.0
"""One outcome for each write, whatever goes wrong around it."""

from __future__ import annotations

import numpy as np
import pytest
from fleet import Model, Ranks, ranks
from handover import HOST, Pool, handover, make_context, until

import te
from bootstrap_server import Topology
from bootstrap_server.ranks.matching import ALL_PAGES
from sglang_mooncake.context import Deadlines
from sglang_mooncake.layout import COMPLETION_BYTES, Buffers, Plan
from sglang_mooncake.links.destinations import Destination
from sglang_mooncake.messages import RoomRequest, Target
from sglang_mooncake.outgoing import COMPLETION_SLOTS, Outgoing
from sglang_mooncake.prefill_side import PrefillSide
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.recipient import Recipient
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.stats import Recorder


class Transfer:
    """What an engine gives for a write, on a bad day."""

    def __init__(self, raises=()):
        self.raises, self.cancelled, self.status = raises, False, te.Status.PENDING
        self.nbytes, self.reason = 1, None

    def poll(self):
        return self.status

    def add_done_callback(self, callback):
        if "callback" in self.raises:
            raise RuntimeError("can't start new thread")

    def cancel(self):
        if "cancel" in self.raises:
            raise OSError("no memory")
        self.cancelled = True


class Peer:
    transport = "tcp"

    def __init__(self, *transfers):
        self.transfers = list(transfers)

    def write(self, blocks, tag):
        if not self.transfers:
            raise MemoryError("a bug")
        return self.transfers.pop(0)


@pytest.fixture
def outgoing():
    with te.Engine(te.Config(host=HOST)) as engine:
        recorder = Recorder(
            make_context("prefill", f"{HOST}:1", Deadlines()), {}, engine.stats, None
        )
        yield Outgoing(engine, recorder, posted.append)
        posted.clear()


posted: list[object] = []
COMPLETIONS = Buffers((1 << 42,), (COMPLETION_BYTES,), (10 * COMPLETION_BYTES,))
MEMORY = Pool(seed=1)
PLACE = make_context("decode", f"{HOST}:1", Deadlines()).place
PLAN = Plan(MEMORY.layout(Buffers((), (), ())), MEMORY.layout(COMPLETIONS))


def to(peer):
    return Destination("a", "decode rank", peer, PLAN, PLACE)


def recipient(completion_slot=0):
    target = Target(1, 1, b"\1\0\0\0", ALL_PAGES, (), 0, completion_slot)
    return Recipient(RoomRequest(1, 1, 0, 1, target), PLAN)


def write(room, to=None, *, last=True):
    chunk = Chunk(np.array([1]), 0, 0 if last else None, 0.0)
    return (to or recipient()).write(room, "a", chunk, range(1), 1)


def test_a_write_that_cannot_begin_keeps_no_completion_record_slot(outgoing):
    room = Room(1, 0.0)
    for _ in range(2):
        with pytest.raises(MemoryError, match="a bug"):
            outgoing.begin(write(room), to(Peer()))
        assert len(outgoing._free_completions) == COMPLETION_SLOTS
    with pytest.raises(ValueError, match="slot for a completion record outside"):
        outgoing.begin(write(room, recipient(completion_slot=999)), to(Peer()))
    assert len(outgoing._free_completions) == COMPLETION_SLOTS
    assert len(outgoing) == 0


def test_a_write_of_which_nobody_can_be_told_is_found_by_the_next_tick(outgoing):
    room, transfer = Room(1, 0.0), Transfer(raises={"callback"})
    outgoing.begin(write(room), to(Peer(transfer)))
    assert outgoing.overlooked() == []
    transfer.status = te.Status.DONE
    (ended,) = outgoing.overlooked()
    outcome = outgoing.outcome(ended)
    assert outcome is not None
    assert (outcome.room, outcome.peer, outcome.nth, outcome.failure) == (room, "a", 1, None)
    assert outgoing.overlooked() == []
    assert outgoing.outcome(ended) is None, "said twice"
    assert len(outgoing._free_completions) == COMPLETION_SLOTS


def test_what_counts_as_sent_has_landed(outgoing):
    room, transfers = Room(1, 0.0), [Transfer(raises={"callback"}) for _ in range(3)]
    ends = [te.Status.CANCELLED, te.Status.DONE, te.Status.FAILED]
    asked, peer = recipient(), Peer(*transfers)
    for nth, (transfer, end) in enumerate(zip(transfers, ends, strict=True)):
        outgoing.begin(write(room, asked, last=nth == 2), to(peer))
        transfer.status = end
    outcomes = [outgoing.outcome(ended) for ended in outgoing.overlooked()]
    assert [(one.nth, one.failure is None) for one in outcomes] == [
        (1, False),
        (2, True),
        (3, False),
    ]
    assert outgoing._recorder.snapshot()["bytes"] == transfers[1].nbytes


def test_a_transfer_that_takes_no_cancel_keeps_no_other_from_it(outgoing, caplog):
    room, transfers = Room(1, 0.0), (Transfer(), Transfer(raises={"cancel"}), Transfer())
    peer, asked = Peer(*transfers), recipient()
    keys = []
    for _ in transfers:
        one = write(room, asked)
        outgoing.begin(one, to(peer))
        keys.append(one.key)
    outgoing.cancel(room, [*keys, ("another one", 1)])
    assert [transfer.cancelled for transfer in transfers] == [True, False, True]
    assert "cannot cancel the" in caplog.text


def test_a_bug_in_the_writing_of_a_chunk_ends_the_room_on_both_sides():
    with handover() as pair:
        pair.decode.know(pair.address)
        source, target = pair.open_both(7)
        pair.name_pages(target, [1], aux=0)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        chunk = Chunk(np.array([1]), 0, 0, 0.0, states=None)  # type: ignore[arg-type]
        pair.prefill.side.send_chunk(source, chunk)
        until(lambda: source.view.over and target.view.over, "both sides let go of the room")
        for room in (source, target):
            assert room.view.state is RoomState.FAILED
            assert "internal error: TypeError" in (room.view.reason or "")
        pair.complete(8, [1], [2], aux=0)


def test_a_write_that_fails_leaves_the_others_of_its_chunk_to_their_own_end(monkeypatch):
    begin, begun = Outgoing.begin, []

    def begin_but_the_first(self, write, destination):
        begun.append(write)
        if len(begun) == 1:
            raise RuntimeError("a bug")
        begin(self, write, destination)

    monkeypatch.setattr(Outgoing, "begin", begin_but_the_first)
    topology = Topology(1, 1, 1, 1), Topology(1, 1, 2, 1)
    with ranks(Model(heads=4), *topology) as instance:
        handed = _asked(instance)
        (coords,) = handed.sources
        instance.send(handed, coords, [4])
        for one in handed.uses:
            until(lambda one=one: one.view.over, "every rank lets go of the room")
            assert one.view.state is RoomState.FAILED
            assert "a bug" in (one.view.reason or "")
        assert len(begun) == 2, "the second one was begun all the same"
        side = instance.prefill[coords].side
        assert isinstance(side, PrefillSide)
        until(lambda: not len(side._outgoing), "its write has ended")
        assert len(side._outgoing._free_completions) == COMPLETION_SLOTS
        assert len(side._rooms) == 0


def _asked(instance: Ranks):
    handed = instance.open(1)
    instance.name_pages(handed, 4)
    for room in handed.sources.values():
        until(lambda room=room: room.view.state is RoomState.READY, "the rank was asked")
    return handed
