# SPDX-License-Identifier: Apache-2.0
"""Digests of a hand-over between two ranks with real engines and sockets: what is right arrives,
and what any fault between the two has changed is found, named and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from faults import FAULTS, Fault, delays_a_block, faulty, landed_then
from fleet import Model, RankMemory
from handover import (
    LAYERS,
    PAGE_BYTES,
    Handover,
    Pool,
    handover,
    until,
)
from hypothesis import given
from hypothesis import strategies as st
from te_transports import TRANSPORTS

import te
from sglang_mooncake import digest_thread, digesting, sent_digests
from sglang_mooncake.digest_thread import DigestThread, Job, Pause
from sglang_mooncake.layout import ALONE, Verify
from sglang_mooncake.layout import cells as cells_module
from sglang_mooncake.layout.chosen import SAMPLE_ROOMS
from sglang_mooncake.layout.pair_cells import PairCells
from sglang_mooncake.rooms.prefill import Chunk, PrefillRooms
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config
from te.peers import Peer

SOURCES, TARGETS = [1, 2, 3, 40], [5, 6, 7, 30]


@contextmanager
def pair_of(transport: str = "tcp", **more: Any) -> Iterator[Handover]:
    config = Config(transports=(transport,))
    with handover(config, decode_config=config, **more) as pair:
        pair.decode.know(pair.address)
        yield pair


def at_once(pair: Handover, source: Room) -> None:
    pair.prefill.send(source, SOURCES, 0, aux_slot=9)


def layers_early(pair: Handover, source: Room) -> None:
    pair.prefill.side.send_layers(source, np.array(SOURCES), 0, LAYERS - 1)
    at_once(pair, source)


def in_two_chunks(pair: Handover, source: Room) -> None:
    pair.prefill.send(source, SOURCES[:2], 0, aux_slot=None)
    pair.prefill.send(source, SOURCES[2:], 2, aux_slot=9)


def hand_over(
    pair: Handover, number: int = 1, send: Callable[[Handover, Room], None] = at_once
) -> tuple[Room, Room]:
    """Until the room has arrived or has failed."""
    source, target = pair.open_both(number)
    pair.name_pages(target, TARGETS, aux=3)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    send(pair, source)
    until(
        lambda: pair.decode.side.has_arrived(target) or target.view.decided, "the room is decided"
    )
    return source, target


def totals(side: Any) -> dict[str, float]:
    return side.recorder.totals()["digests"]


@pytest.mark.parametrize("verify", [(Verify.ALL, Verify.OFF), (Verify.OFF, Verify.ALL)])
def test_what_arrives_right_is_told_once_all_of_it_is_compared(verify):
    """The stricter of the two sides counts."""
    with pair_of(verify=verify) as pair:
        source, target = hand_over(pair)
        assert pair.decode.side.has_arrived(target)
        (expected,) = target.view.expected
        assert target.view.verified == {expected.tag}
        cells = len(SOURCES) * LAYERS + 1  # and the metadata
        nbytes = len(SOURCES) * LAYERS * PAGE_BYTES + Pool().aux.shape[1]
        for side in (pair.prefill, pair.decode):
            assert (totals(side)["cells"], totals(side)["bytes"]) == (cells, nbytes)
        assert (totals(pair.decode)["equal"], totals(pair.decode)["different"]) == (1, 0)
        until(lambda: source.view.state is RoomState.DONE, "the prefill side is done")


def test_nothing_is_digested_where_neither_side_wants_it():
    with pair_of(verify=(Verify.OFF, Verify.OFF)) as pair:
        _, target = hand_over(pair)
        assert pair.decode.side.has_arrived(target)
        assert not target.view.verified
        assert not totals(pair.prefill)["cells"]
        assert not totals(pair.decode)["cells"]


#: Which writes a request has, and in which of them there is a fault.
SENT = [(at_once, 0), (layers_early, 0), (in_two_chunks, 1)]


@pytest.mark.parametrize(("send", "nth"), SENT, ids=[one.__name__ for one, _ in SENT])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", FAULTS, ids=[one.__name__ for one in FAULTS])
def test_every_fault_is_found_and_named(transport, fault: Fault, send, nth):
    with pair_of(transport) as pair, faulty(pair, fault, nth) as planted:
        source, target = hand_over(pair, send=send)
        assert planted, "the fault has happened"
        until(lambda: target.view.over, "the room has failed")
        assert target.view.state is RoomState.FAILED
        reason = target.view.reason or ""
        assert "is not the one that was sent: page" in reason
        for what in ("latent of layer", "prefill rank", "decode rank", "room 1"):
            assert what in reason
        assert totals(pair.decode)["different"] == 1
        until(lambda: source.view.over, "the prefill side is told")
        if fault is delays_a_block:  # It has landed all the same, when all had been compared.
            np.testing.assert_array_equal(pair.target.kv[:, TARGETS], pair.source.kv[:, SOURCES])
    assert not pair.decode.side.has_arrived(target)


def test_a_request_after_one_that_differs_arrives():
    with pair_of() as pair:
        with faulty(pair, FAULTS[0]):
            _, first = hand_over(pair)
            until(lambda: first.view.over, "the first room has failed")
        _, second = hand_over(pair, number=2)
        assert pair.decode.side.has_arrived(second)
        assert (totals(pair.decode)["equal"], totals(pair.decode)["different"]) == (1, 1)


def test_of_sampled_requests_one_of_some_is_compared(monkeypatch):
    """As drawn, by the prefill rank."""
    with pair_of(verify=(Verify.SAMPLE, Verify.SAMPLE)) as pair:
        numbers = iter([SAMPLE_ROOMS * 5, 3, SAMPLE_ROOMS * 7 + 1, 0])
        monkeypatch.setattr(pair.prefill.side._rooms, "_random", lambda: next(numbers))
        compared = []
        for number in range(1, 5):
            _, target = hand_over(pair, number)
            compared.append(bool(target.view.verified))
            pair.decode.side.arrived(target)
        assert compared == [True, False, False, True]


def test_what_is_compared_is_drawn_once_the_engine_has_all_writes(monkeypatch):
    """Nothing that moves the bytes can know which of them are looked at."""
    happened: list[str] = []
    write = Peer.write

    def writes(peer: Peer, blocks: te.Blocks, tag: int = 0) -> te.Transfer:
        transfer = write(peer, blocks, tag)
        happened.append("write")
        return transfer

    def draws(bits: int) -> int:
        happened.append("draw")
        return 7

    with pair_of(verify=(Verify.SAMPLE, Verify.OFF)) as pair:
        sampled(pair, monkeypatch)
        monkeypatch.setattr(Peer, "write", writes)
        monkeypatch.setattr(sent_digests, "secrets", SimpleNamespace(randbits=draws))
        _, target = hand_over(pair, send=in_two_chunks)
        assert target.view.verified
    assert happened == ["write", "write", "draw"]


@given(st.lists(st.none() | st.floats(0, 0.1), min_size=1, max_size=50))
def test_looks_for_what_has_landed_take_a_tenth_of_the_time(happenings):
    """None: one more job has to wait. Else a look, and how long it took."""
    looks, now_s = digest_thread.Looks(), 0.0
    owed_s = now_s
    for spent_s in happenings:
        if spent_s is None:
            looks.came(now_s)
            soon_s = now_s + digest_thread._PAUSE_MIN_S
        else:
            now_s = max(now_s, owed_s) + spent_s
            looks.looked(now_s, spent_s)
            owed_s = now_s + min(9 * spent_s, digest_thread._PAUSE_OF_LOOKS_MAX_S)
            soon_s = now_s + digest_thread._PAUSE_MAX_S
        assert owed_s <= looks.due_s <= max(owed_s, soon_s)


def test_jobs_that_wait_are_looked_at_though_others_come():
    thread, is_over, looked = DigestThread("test"), threading.Event(), []
    thread.start()

    def waits() -> Job:
        while len(looked) < 4:
            looked.append(1)
            yield Pause.NOT_YET

    def come() -> Job:
        """As long as it waits, another one comes."""
        if len(looked) > 3:
            is_over.set()
        else:
            thread.add(come())
        yield from ()

    thread.add(waits())
    thread.add(come())
    assert is_over.wait(60)
    thread.close()


def test_jobs_take_turns_and_one_that_fails_ends_alone(caplog):
    thread, done, is_over = DigestThread("test"), [], threading.Event()

    def piece_by_piece(name: str, pieces: int) -> Job:
        for _ in range(pieces):
            done.append(name)
            yield Pause.OTHERS_TURN

    def fails() -> Job:
        raise ArithmeticError("of a bug")
        yield

    def last() -> Job:
        yield from piece_by_piece("last", 3)
        is_over.set()

    for job in (piece_by_piece("large", 5), fails(), piece_by_piece("small", 1), last()):
        thread.add(job)
    thread.start()
    assert is_over.wait(60)
    thread.close()
    first = ["large", "small", "last", "large", "last", "large", "last", "large"]
    assert done[: len(first)] == first
    assert "of a bug" in caplog.text


def test_a_request_of_a_page_does_not_wait_for_one_of_many(monkeypatch):
    """Its pages would be kept, and it would arrive late, for as long as another one is digested."""
    monkeypatch.setattr(cells_module, "CELLS_AT_ONCE", 1)
    asked, go_on, order = threading.Event(), threading.Event(), []
    with pair_of() as pair:
        sent = pair.prefill.side._digests
        read, post = sent.digester.digests, sent.post

        def late(*of: Any) -> Any:
            asked.set()
            assert go_on.wait(60)
            return read(*of)

        def note(made: Any) -> None:
            order.append(made.room.number)
            post(made)

        monkeypatch.setattr(sent.digester, "digests", late)
        monkeypatch.setattr(sent, "post", note)
        targets = []
        for number, pages, aux in ((1, list(range(20)), 3), (2, [40], 4)):
            source, target = pair.open_both(number)
            targets.append(target)
            pair.name_pages(target, pages, aux=aux)
            until(lambda of=source: of.view.state is RoomState.READY, "it is ready")
            pair.prefill.send(source, pages, 0, aux_slot=9)
            assert asked.wait(60)
        until(lambda: not sent._thread._new.empty(), "the second one is asked for")
        go_on.set()
        for target in targets:
            until(lambda of=target: pair.decode.side.has_arrived(of), "it has arrived")
        assert order == [2, 1]


def late_digests(monkeypatch, module=sent_digests) -> tuple[threading.Event, threading.Event]:
    """Digests are made once the first event is set; the second one says that some are wanted.
    module: of the side whose digests these are."""
    go_on, asked = threading.Event(), threading.Event()
    make = module.make_digests

    def late(*args: Any) -> Any:
        asked.set()
        assert go_on.wait(60)
        return make(*args)

    monkeypatch.setattr(module, "make_digests", late)
    return go_on, asked


def begin(pair):
    """Both sides of a room of which all has been given to the engine."""
    source, target = pair.open_both(1)
    pair.name_pages(target, TARGETS, aux=3)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, SOURCES, 0, aux_slot=9)
    return source, target


def test_pages_are_kept_until_their_digests_are_made(monkeypatch):
    """The prefill room is not done before: its scheduler would use the pages again."""
    go_on, asked = late_digests(monkeypatch)
    with pair_of() as pair:
        source, target = begin(pair)
        (expected,) = target.view.expected
        until(lambda: pair.decode.engine.arrived(expected.tag) == 1, "all bytes have landed")
        assert asked.wait(60)
        assert not pair.decode.side.has_arrived(target)
        assert source.view.state is RoomState.ALL_SENT
        go_on.set()
        until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
        until(lambda: source.view.state is RoomState.DONE, "the prefill side is done")


def test_a_room_whose_digests_never_come_ends(monkeypatch, caplog):
    go_on, asked = late_digests(monkeypatch)
    with pair_of() as pair:
        source, target = begin(pair)
        assert asked.wait(60)
        until(lambda: source.view.state is RoomState.ALL_SENT, "all is sent")
        rooms = pair.prefill.side._rooms
        rooms._deadlines = replace(rooms._deadlines, chunk_s=0.0)
        until(lambda: source.view.over and target.view.over, "both sides know")
        go_on.set()
    assert "no digest of what was sent: not made within 0 s" in source.view.reason
    assert "prefill side: no digest of what was sent" in target.view.reason
    assert "no digests of room 1: not made within 0 s" in caplog.text


#: What may go wrong with digests themselves, and what is said of it.
TROUBLES = [
    (te.DigestError("the device is lost"), "the device is lost"),
    (MemoryError(), "internal error: MemoryError()"),
]


def cannot_read(pair: Handover, side: str, error: Exception, monkeypatch: Any) -> None:
    def fails(*args: Any) -> Any:
        raise error

    digests = (pair.prefill if side == "prefill" else pair.decode).side._digests
    monkeypatch.setattr(digests.digester, "digests", fails)


@pytest.mark.parametrize("verify", [(Verify.ALL, Verify.OFF), (Verify.SAMPLE, Verify.ALL)])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("error", "reason"), TROUBLES)
def test_where_all_is_compared_a_digest_that_cannot_be_made_ends_the_request(
    side, error, reason, verify, monkeypatch
):
    """Whichever side wants all."""
    with pair_of(verify=verify) as pair:
        cannot_read(pair, side, error, monkeypatch)
        source, target = hand_over(pair)
        until(lambda: target.view.over and source.view.over, "both sides know")
        assert target.view.state is RoomState.FAILED
        assert reason in (target.view.reason or "")
        assert not pair.decode.side.has_arrived(target)


def is_done(room: Room) -> bool:
    return room.view.state is RoomState.DONE


def sampled(pair: Handover, monkeypatch: Any) -> None:
    """Each request is one of the sample."""
    monkeypatch.setattr(pair.prefill.side._rooms, "_random", lambda: 0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(("error", "reason"), TROUBLES)
def test_one_of_a_sample_arrives_though_its_digest_cannot_be_made(
    side, error, reason, monkeypatch, caplog
):
    with pair_of(verify=(Verify.SAMPLE, Verify.OFF)) as pair:
        sampled(pair, monkeypatch)
        cannot_read(pair, side, error, monkeypatch)
        for number in (1, 2):
            source, target = hand_over(pair, number)
            assert pair.decode.side.has_arrived(target)
            pair.decode.side.arrived(target)
            until(partial(is_done, source), "the prefill side is done")
        np.testing.assert_array_equal(pair.target.kv[:, TARGETS], pair.source.kv[:, SOURCES])
        found = totals(pair.decode)
        outcomes = found["equal"], found["different"], found["not compared"]
        assert outcomes == (0, 0, 2)
    lines = [one for one in caplog.records if one.name == digesting.__name__]
    # Of the first request alone: on each side that has something to say.
    assert [reason in one.message and "room 1" in one.message for one in lines] == [True] * (
        2 if side == "prefill" else 1
    )


def test_cells_that_cannot_be_listed_fail_no_request_of_a_sample(monkeypatch, caplog):
    """A layout that the rules of digests have wrong is copied rightly all the same."""

    def fails(*args: Any) -> Any:
        raise ValueError("no such row")

    with pair_of(verify=(Verify.SAMPLE, Verify.SAMPLE)) as pair:
        sampled(pair, monkeypatch)
        monkeypatch.setattr(PairCells, "of_source", fails)
        _, target = hand_over(pair)
        assert pair.decode.side.has_arrived(target)
        assert totals(pair.decode)["not compared"] == 1
    assert "no such row" in caplog.text


def test_a_sample_whose_sides_disagree_on_what_was_sent_ends_its_request(monkeypatch):
    """A page too few is as wrong as a page with other bytes."""
    made = PairCells.of_source

    def without_a_page(cells: PairCells, pages: Any, *more: Any) -> Any:
        found = made(cells, pages, *more)
        return tuple(
            replace(one, positions=one.positions[:-1], items=one.items[:-1])
            if one.name == "page"
            else one
            for one in found
        )

    with pair_of(verify=(Verify.SAMPLE, Verify.OFF)) as pair:
        sampled(pair, monkeypatch)
        monkeypatch.setattr(PairCells, "of_source", without_a_page)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "pages were sent" in (target.view.reason or "")
        found = totals(pair.decode)
        assert (found["different"], found["not compared"]) == (1, 0)


def test_state_that_has_no_digests_ends_its_request(monkeypatch):
    """It has arrived, and nothing says that it is right."""
    made, model = PairCells.of_source, Model(channels=4)

    def without_state(cells: PairCells, *of: Any) -> Any:
        return tuple(one for one in made(cells, *of) if one.name != "conv")

    def hands_over(pair: Handover, number: int) -> Room:
        source, target = pair.open_both(number)
        slot = (np.array([number]),)
        pair.decode.side.name_pages(target, np.array(TARGETS), 3, 0, slot)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        chunk = Chunk(np.array(SOURCES), 0, 9, time.monotonic(), slot)
        pair.prefill.side.send_chunk(source, chunk)
        pair.prefill.side.polled(source, sent=True)
        until(lambda: pair.decode.side.has_arrived(target) or target.view.over, "it is decided")
        return target

    memories = [RankMemory(model, ALONE, 64) for _ in range(2)]
    with pair_of(source=memories[0], target=memories[1]) as pair:
        assert pair.decode.side.has_arrived(hands_over(pair, 1))
        monkeypatch.setattr(PairCells, "of_source", without_state)
        target = hands_over(pair, 2)
        assert "bytes, and none of conv; " in (target.view.reason or "")
        assert "bytes were sent" in (target.view.reason or "")
        assert totals(pair.decode)["different"] == 1


def test_what_a_sample_finds_ends_its_request(monkeypatch):
    """Its cells are few enough here that each of them is drawn."""
    with pair_of(verify=(Verify.SAMPLE, Verify.OFF)) as pair, faulty(pair, FAULTS[0]):
        sampled(pair, monkeypatch)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "is not the one that was sent: page" in (target.view.reason or "")


def test_a_sample_where_all_was_asked_for_fails_the_request(monkeypatch):
    with pair_of(verify=(Verify.SAMPLE, Verify.ALL)) as pair:
        sampled(pair, monkeypatch)
        monkeypatch.setattr(PrefillRooms, "_verify_for", lambda self, recipient: Verify.SAMPLE)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "some pages where all were asked for" in (target.view.reason or "")


@pytest.fixture
def unreadable(monkeypatch):
    """As if the memory were a GPU's in somebody else's context."""

    def refuse(engine: te.Engine) -> Any:
        raise te.DigestError("CUDA memory of cuda:0 cannot be read: te cannot copy it")

    monkeypatch.setattr(te.Engine, "digester", refuse)


@pytest.mark.usefixtures("unreadable")
def test_where_memory_cannot_be_read_nothing_is_digested_and_all_else_works(caplog):
    with pair_of(verify=(Verify.SAMPLE, Verify.OFF)) as pair:
        assert "no digests are made on this rank: CUDA memory" in caplog.text
        _, target = hand_over(pair)
        assert pair.decode.side.has_arrived(target)


@pytest.mark.usefixtures("unreadable")
def test_a_rank_that_is_to_digest_all_and_cannot_does_not_start():
    with pytest.raises(te.DigestError, match="cannot be read"), pair_of():
        pass


def test_a_decode_rank_that_is_told_none_where_it_wants_all_fails_the_request(monkeypatch):
    with pair_of(verify=(Verify.OFF, Verify.ALL)) as pair:
        monkeypatch.setattr(pair.prefill.side._rooms, "_verify", None)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "digests: 1 asked for, 0 sent" in (target.view.reason or "")


@pytest.mark.parametrize("verify", [Verify.SAMPLE, Verify.ALL])
def test_a_decode_rank_that_cannot_compare_takes_a_sample_and_fails_what_needs_it(
    verify, monkeypatch
):
    with pair_of(verify=(verify, Verify.OFF)) as pair:
        sampled(pair, monkeypatch)
        digests = pair.decode.side._digests
        digests.digester.close()
        digests.digester = None
        _, target = hand_over(pair)
        until(lambda: target.view.over or pair.decode.side.has_arrived(target), "it is decided")
        assert target.view.over == (verify is Verify.ALL)
        assert not target.view.over or "cannot read its memory" in target.view.reason
        assert totals(pair.decode)["not compared"] == 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_while_digests_are_made_ends_both_sides(side, monkeypatch):
    go_on, asked = late_digests(monkeypatch)
    with pair_of() as pair:
        source, target = begin(pair)
        assert asked.wait(60)
        if side == "prefill":
            pair.prefill.side.abort(source, "the client has left")
        else:
            pair.decode.side.abort(target, "the client has left")
        until(lambda: target.view.over, "the decode room is over")
        assert not source.view.over, "its pages are being read"
        go_on.set()
        until(lambda: source.view.over, "the prefill room is over")
        assert not pair.decode.side.has_arrived(target)


def test_pages_that_are_used_again_while_they_are_read_are_no_difference(monkeypatch):
    """An abort frees the pages of the decode side; what another request writes there is its own."""
    go_on, asked = threading.Event(), threading.Event()
    with pair_of() as pair:
        digester = pair.decode.side._digests.digester
        read = digester.digests

        def late(addresses: Any, *more: Any) -> Any:
            if int(addresses[0]) == pair.target.aux[3].ctypes.data:  # what is read last
                asked.set()
                assert go_on.wait(60)
                pair.target.aux[3] += 1
            return read(addresses, *more)

        monkeypatch.setattr(digester, "digests", late)
        source, target = pair.open_both(1)
        pair.name_pages(target, TARGETS, aux=3)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        pair.prefill.send(source, SOURCES, 0, aux_slot=9)
        assert asked.wait(60)
        pair.decode.side.abort(target, "the client has left")
        until(lambda: target.view.over, "the pages are free")
        go_on.set()
    # Its thread has ended.
    assert (totals(pair.decode)["equal"], totals(pair.decode)["different"]) == (0, 0)


def test_every_slot_of_metadata_is_compared():
    with pair_of() as pair:

        def spoil(_: Any) -> None:
            pair.target.aux[3, 5] ^= 4

        pair.decode.side._digests.landed = landed_then(pair, spoil)
        _, target = hand_over(pair)
        until(lambda: target.view.over, "the room has failed")
        assert "is not the one that was sent: metadata 0 in metadata 0." in target.view.reason


def test_pages_that_are_named_shift_with_what_is_sent():
    """Digests do not know page numbers: only bytes and positions."""
    with pair_of() as pair:
        _, target = hand_over(pair)
        assert pair.decode.side.has_arrived(target)
        np.testing.assert_array_equal(pair.target.kv[:, TARGETS], pair.source.kv[:, SOURCES])
