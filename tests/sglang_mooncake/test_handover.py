# SPDX-License-Identifier: Apache-2.0
"""The whole hand-over between two ranks in one process, with real sockets, without SGLang."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import zmq
from handover import (
    AUX_BYTES,
    CANARY,
    HOST,
    LAYERS,
    NEVER_S,
    PAGE_BYTES,
    PAGE_SIZE,
    PAGES,
    PATIENT,
    WAIT_S,
    DecodeRank,
    Handover,
    Pool,
    handover,
    make_context,
    patient,
    until,
)
from te_ports import held_port

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
)
from sglang_mooncake import fetching
from sglang_mooncake.layout import COMPLETION_BYTES, CompletionRecord
from sglang_mooncake.links.sockets import open_dealer, open_router
from sglang_mooncake.messages import PROTOCOL_VERSION, HelloReply, LinkReset, encode
from sglang_mooncake.messages import decode as decode_message
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config


@pytest.fixture
def pair():
    with handover() as ranks:
        ranks.decode.know(ranks.address)
        yield ranks


def assert_copied(pair: Handover, sources: list[int], targets: list[int]) -> None:
    """The oracle: named pages equal their source, every other page holds the canary."""
    expected = np.full_like(pair.target.kv, CANARY)
    expected[:, targets] = pair.source.kv[:, sources]
    np.testing.assert_array_equal(pair.target.kv, expected)


def test_where_the_links_stand_pages_are_named_without_waiting_for_the_loop(pair):
    pair.complete(1, [1], [2], aux=0)
    source = pair.prefill.side.open_room(2, register_dp_rank=False)
    target = pair.decode.side.new_room(2)
    assert not target.nameable
    pair.decode.side.choose_sources(target, pair.address, 0)
    assert target.linked
    assert target.nameable
    pair.name_pages(target, [3, 4], aux=1)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [5, 6], 0, aux_slot=1)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    assert_copied(pair, [1, 5, 6], [2, 3, 4])


def test_a_room_whose_links_do_not_stand_yet_waits_for_them(pair):
    target = pair.decode.side.new_room(1)
    pair.decode.side.choose_sources(target, pair.address, 0)
    assert not target.linked
    until(lambda: target.nameable, "the decode room is ready")


def test_one_chunk_lands_byte_for_byte_and_nothing_else_changes(pair):
    source, target = pair.open_both(7)
    pair.name_pages(target, [5, 6, 7, 30], aux=3, prefix=8)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    assert source.view.decode_prefix_len == 8
    pair.prefill.send(source, [1, 2, 3, 40], 0, aux_slot=9)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    assert_copied(pair, [1, 2, 3, 40], [5, 6, 7, 30])
    np.testing.assert_array_equal(pair.target.aux[3], pair.source.aux[9])
    assert (np.delete(pair.target.aux, 3, axis=0) == CANARY).all()
    until(lambda: source.view.state is RoomState.DONE, "the prefill side knows")
    pair.decode.side.arrived(target)
    until(lambda: target.view.state is RoomState.DONE, "the decode side is done")


def test_chunks_arrive_as_one_room(pair):
    source, target = pair.open_both(8)
    pair.name_pages(target, list(range(10, 16)), aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [0, 1], 0, None)
    pair.prefill.send(source, [2, 3], 2, None)
    until(lambda: source.view.state is RoomState.SENDING, "two chunks are under way")
    assert not pair.decode.side.has_arrived(target)
    pair.prefill.send(source, [4, 5], 4, aux_slot=1)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    assert_copied(pair, list(range(6)), list(range(10, 16)))


def test_the_completion_record_says_what_was_sent_and_the_engine_has_counted_that(pair):
    source, target = pair.open_both(8)
    pair.name_pages(target, list(range(10, 15)), aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [0, 1], 0, None)
    pair.prefill.send(source, [2], 2, None)
    pair.prefill.send(source, [4, 5], 3, aux_slot=1)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    (expected,) = target.view.expected
    nbytes = 5 * LAYERS * PAGE_BYTES + AUX_BYTES + COMPLETION_BYTES
    sent = CompletionRecord(
        target.view.generation,
        writes=3,
        pages=5,
        page_layers=5 * LAYERS,
        states=0,
        aux=1,
        digests=1,
        nbytes=nbytes,
    )
    assert pair.decode.completions.read(expected.slot) == sent
    assert pair.decode.engine.arrived_nbytes(expected.tag) == nbytes


class Filling:
    """An event of a GPU stream that fills pages: they are wrong until it has happened."""

    def __init__(self, memory, pages: list[int]) -> None:
        self._memory, self._pages = memory, pages
        self._right = memory[:, pages].copy()
        memory[:, pages] = 0xBB
        self._happened = threading.Event()

    def happen(self) -> None:
        self._memory[:, self._pages] = self._right
        self._happened.set()

    def query(self) -> bool:
        return self._happened.is_set()


def test_a_last_chunk_waits_for_the_cached_prefix_that_the_gpu_still_fills(pair):
    source, target = pair.open_both(8)
    pair.name_pages(target, [10, 11, 12, 13], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    event = Filling(pair.source.kv, [0, 1])
    pair.prefill.send(source, [0, 1], 0, None, (event,))
    pair.prefill.send(source, [2, 3], 2, aux_slot=1)
    bystander, its_target = pair.open_both(9)
    pair.name_pages(its_target, [], aux=5)
    until(lambda: bystander.view.state is RoomState.READY, "another room is ready")
    assert source.view.state is RoomState.READY, "no chunk was handed to the engine"
    event.happen()
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    assert_copied(pair, [0, 1, 2, 3], [10, 11, 12, 13])
    until(lambda: source.view.state is RoomState.DONE, "the prefill side knows")


def test_an_event_that_fails_ends_the_room_on_both_sides(pair):
    class Failing:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: device-side assert triggered")

    source, target = pair.open_both(8)
    pair.name_pages(target, [10, 11], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [0], 0, None, (Failing(),))
    pair.prefill.send(source, [1], 1, aux_slot=1)
    until(lambda: source.view.over and target.view.over, "both sides let go of the room")
    assert "device-side assert" in (target.view.reason or "")
    assert not pair.decode.side.has_arrived(target)


def test_a_fully_cached_prompt_hands_over_its_metadata_alone(pair):
    source, target = pair.open_both(9)
    pair.name_pages(target, [], aux=2, prefix=100)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [], 0, aux_slot=4)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    assert_copied(pair, [], [])
    np.testing.assert_array_equal(pair.target.aux[2], pair.source.aux[4])


def test_the_decode_side_may_come_first(pair):
    target = pair.decode.side.new_room(11)
    pair.decode.side.choose_sources(target, pair.address, 0)
    until(lambda: target.view.state is RoomState.READY, "the decode room is ready")
    pair.name_pages(target, [1], aux=0)
    until(lambda: target.view.state is RoomState.REQUESTED, "pages are published")
    source = pair.prefill.side.open_room(11, register_dp_rank=False)
    until(lambda: source.view.state is RoomState.READY, "the prefill room met its request")


def test_an_aborted_decode_room_is_never_written_again(pair):
    source, target = pair.open_both(12)
    pair.name_pages(target, [1, 2], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    # The abort's fence is the decode side's own doing: it needs no word from the prefill side.
    pair.decode.side.abort(target, "client gone")
    until(lambda: target.view.over, "the room is fenced")
    assert (target.view.state, target.view.reason) == (RoomState.ABORTED, "client gone")
    pair.prefill.send(source, [1, 2], 0, aux_slot=0)
    until(lambda: source.view.over, "the prefill side gives up, too")
    assert_copied(pair, [], [])
    assert source.view.state in (RoomState.ABORTED, RoomState.FAILED)


def test_an_abort_of_the_prefill_side_reaches_the_decode_side(pair):
    source, target = pair.open_both(13)
    pair.name_pages(target, [1, 2], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.side.abort(source, "client gone")
    until(lambda: target.view.over, "the decode room failed")
    assert target.view.state is RoomState.FAILED
    assert target.view.reason == "prefill side: client gone"


def test_a_request_for_a_room_that_has_failed_is_answered_at_once(pair):
    source = pair.prefill.side.open_room(14, register_dp_rank=False)
    pair.prefill.side.abort(source, "client gone")
    pair.prefill.side.close_room(source)
    until(lambda: source.view.over, "the prefill room is over")
    target = pair.decode.side.new_room(14)
    pair.decode.side.choose_sources(target, pair.address, 0)
    until(lambda: target.view.state is RoomState.READY, "the decode room is ready")
    pair.name_pages(target, [1], aux=0)
    until(lambda: target.view.over, "the decode room failed")
    assert "client gone" in (target.view.reason or "")


def test_too_many_or_too_few_pages_fail_with_both_numbers(pair):
    source, target = pair.open_both(15)
    pair.name_pages(target, [1, 2, 3], aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, [1, 2], 0, aux_slot=0)
    until(lambda: source.view.over and target.view.over, "both sides failed")
    assert "pages 0..2" in (target.view.reason or "")
    assert "made room for 3 pages" in (target.view.reason or "")


@pytest.mark.parametrize(
    ("source_pages", "target_pages", "says"),
    [([PAGES], [1], "prefill page outside"), ([1], [PAGES], "decode page outside")],
)
def test_pages_outside_the_pool_are_refused_before_a_byte_moves(
    pair, source_pages, target_pages, says
):
    source, target = pair.open_both(16)
    pair.name_pages(target, target_pages, aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, source_pages, 0, aux_slot=0)
    until(lambda: source.view.over and target.view.over, "both sides failed")
    assert says in (target.view.reason or "")
    assert_copied(pair, [], [])


def test_a_dead_prefill_rank_fails_its_rooms_and_the_next_one_serves(pair):
    _, target = pair.open_both(17)
    pair.name_pages(target, [1], aux=0)
    pair.prefill.close()
    until(lambda: target.view.over, "the decode room failed")
    assert target.view.state is RoomState.FAILED
    assert "lost the connection to prefill rank" in (target.view.reason or "")
    until(lambda: pair.address not in pair.decode.side.instances.infos, "the instance is forgotten")


@pytest.mark.usefixtures("short_grace")
def test_different_page_sizes_are_refused_with_both_values_and_the_flag():
    with handover(decode_page_size=16) as pair:
        pair.decode.know(pair.address)
        source = pair.prefill.side.open_room(19, register_dp_rank=False)
        target = pair.decode.side.new_room(19)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.view.over, "the decode room is refused")
        for part in ("4", "16", "--page-size"):
            assert part in (target.view.reason or "")
        until(lambda: source.view.over, "the prefill side does not wait for its deadline")


def test_rooms_that_nobody_asks_for_time_out_and_say_so():
    with handover(deadlines=replace(PATIENT, bootstrap_s=0.3, waiting_s=0.3)) as pair:
        pair.decode.know(pair.address)
        source = pair.prefill.side.open_room(20, register_dp_rank=False)
        until(lambda: source.view.over, "the prefill room timed out")
        assert source.view.state is RoomState.TIMED_OUT
        target = pair.decode.side.new_room(21)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.view.state is not RoomState.OPEN, "the decode room moves")
        pair.name_pages(target, [1], aux=0)
        until(lambda: target.view.over, "the decode room timed out")
        assert target.view.state in (RoomState.TIMED_OUT, RoomState.FAILED)
        assert "0 s" in (target.view.reason or "")


def test_an_unknown_registry_is_named_with_the_reason():
    with handover() as pair:
        address = "127.0.0.1:9"  # discard: nothing listens there
        assert not pair.decode.side.instances.ensure(address)
        until(lambda: pair.decode.side.instances.problem(address), "the problem is known")
        assert address in str(pair.decode.side.instances.problem(address))


def register(
    address: str, topology: Topology, coords: RankCoords, port: int, protocol: int
) -> None:
    config = InstanceConfig(topology, KVFormat(PAGE_SIZE, "float32"), protocol=protocol)
    with BootstrapClient(address, WAIT_S) as client:
        client.register(RankRecord(config, Rank(coords, HOST, port, epoch=1)), deadline_s=WAIT_S)


@contextmanager
def decode_alone() -> Iterator[tuple[str, DecodeRank]]:
    """A decode rank and an empty registry."""
    server = BootstrapServer(host=HOST, port=0, lease_s=NEVER_S)
    rank = DecodeRank(make_context("decode", "", PATIENT), patient(Config()), Pool())
    try:
        yield f"{HOST}:{server.port}", rank
    finally:
        rank.close()
        server.close()


def test_a_rank_that_never_registers_is_named(monkeypatch):
    monkeypatch.setattr(fetching, "LOOKUP_WAIT_S", 0.2)
    with decode_alone() as (address, decode):
        register(address, Topology(1, 1, 2, 1), RankCoords(0, 0, 0, 0), 1, PROTOCOL_VERSION)
        assert not decode.side.instances.ensure(address)
        until(lambda: decode.side.instances.problem(address), "the problem is known")
        problem = str(decode.side.instances.problem(address))
        assert "1 of 2 ranks" in problem
        assert "dp 0 cp 0 tp 1 pp 0" in problem


def test_an_instance_of_another_protocol_version_is_refused_with_both():
    with decode_alone() as (address, decode):
        register(address, Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0), 1, PROTOCOL_VERSION + 41)
        decode.know(address)
        room = decode.side.new_room(1)
        decode.side.choose_sources(room, address, 0)
        until(lambda: room.view.over, "the room is refused")
        for part in (str(PROTOCOL_VERSION + 41), str(PROTOCOL_VERSION), "sglang-mooncake"):
            assert part in (room.view.reason or "")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_peer_that_speaks_another_version_is_told_apart_by_its_first_message(side):
    other = PROTOCOL_VERSION + 41
    with zmq.Context() as context:
        if side == "prefill":
            with decode_alone() as (address, decode):
                router, port = open_router(context, HOST, 1000, deadlines=PATIENT)
                register(
                    address, Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0), port, PROTOCOL_VERSION
                )
                decode.know(address)
                room = decode.side.new_room(1)
                decode.side.choose_sources(room, address, 0)
                identity, _hello = router.recv_multipart()
                router.send_multipart([identity, encode(HelloReply(""), other)])
                until(lambda: room.view.over, "the room is refused")
                router.close(linger=0)
                assert f"version {other}" in (room.view.reason or "")
        else:
            with handover() as pair:
                port = pair.prefill.port
                dealer, monitor = open_dealer(context, HOST, port, PATIENT, 1000)
                dealer.send(encode(LinkReset(""), other))
                assert dealer.poll(WAIT_S * 1000)
                reply = decode_message(dealer.recv())
                dealer.disable_monitor()
                monitor.close(linger=0)
                dealer.close(linger=0)
                assert isinstance(reply, HelloReply)
                assert f"version {other}" in (reply.refused or "")


def test_a_prefill_rank_that_does_not_answer_is_named_after_the_deadline():
    with decode_alone() as (address, decode), socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        register(address, Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0), port, PROTOCOL_VERSION)
        decode.know(address)
        room = decode.side.new_room(1)
        decode.side.choose_sources(room, address, 0)
        links = decode.side._links
        until(lambda: any(link.connected for link in list(links._links.values())), "it is reached")
        links._timeout_s = 0.5  # from now on, so that it is the answer alone that is late
        until(lambda: room.view.over, "the room fails")
        assert "did not answer the hello within 0.5 s" in (room.view.reason or "")
        assert str(port) in (room.view.reason or "")


def test_garbage_on_the_control_port_is_refused_and_serving_goes_on(pair):
    with zmq.Context() as context:
        dealer, monitor = open_dealer(context, HOST, pair.prefill.port, PATIENT, 1000)
        dealer.send(b"GET / HTTP/1.1")
        assert dealer.poll(WAIT_S * 1000)
        reply = decode_message(dealer.recv())
        dealer.disable_monitor()
        monitor.close(linger=0)
        dealer.close(linger=0)
    assert isinstance(reply, HelloReply)
    assert "not a hand-over message" in (reply.refused or "")
    pair.complete(30, [1], [2], aux=0)


@pytest.mark.usefixtures("short_grace")
def test_a_room_asked_for_at_the_port_of_a_former_life_does_not_wait_for_its_deadline(pair):
    """The request reached the prefill server after its restart; the decode server still knew the
    former life, failed the room, and tells the next life when it has found it."""
    source = pair.prefill.side.open_room(7, register_dp_rank=False)
    known = pair.decode.side.instances._known
    (rank,) = known[pair.address].ranks
    with held_port() as port:
        dead = msgspec.structs.replace(rank, port=port, epoch=rank.epoch - 1)
        known[pair.address] = msgspec.structs.replace(known[pair.address], ranks=(dead,))
        target = pair.decode.side.new_room(7)
        pair.decode.side.choose_sources(target, pair.address, 0)
        until(lambda: target.view.state is RoomState.FAILED, "nobody listens there")
    assert "no process listens there" in target.view.reason
    pair.decode.know(pair.address)
    pair.complete(8, [0], [1], aux=0)
    until(lambda: source.view.state is RoomState.ABORTED, "the prefill rank has been told")
    assert "the decode server ended the request: the connection to" in source.view.reason
