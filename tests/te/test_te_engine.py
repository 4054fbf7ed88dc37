# SPDX-License-Identifier: Apache-2.0
"""Two engines in this process: what the API promises when everybody behaves."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from te_far import pattern, wait_until
from te_raw import raw_destination, take_hello, welcome
from te_transports import TRANSPORTS

import te
from te.core.engine import Engine as Plane

TIMEOUT_S = 20.0


class Pair:
    """A source with a patterned buffer, a destination with a guarded one."""

    def __init__(self, source: te.Engine, target: te.Engine, nbytes: int) -> None:
        self.source, self.target = source, target
        self.src, self.dst = pattern(1, nbytes), np.full(nbytes, 0xEE, np.uint8)
        self.src_region = source.register(self.src)
        self.dst_region = target.register(self.dst, remote="read-write")
        self.peer = source.connect(target.card())

    def blocks(self, src: object, dst: object, nbytes: object) -> te.Blocks:
        """Blocks from offsets."""
        src_address = self.src.ctypes.data + np.asarray(src, np.uint64)
        dst_address = self.dst.ctypes.data + np.asarray(dst, np.uint64)
        return te.Blocks.of(src_address, dst_address, nbytes)  # type: ignore[arg-type]


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = te.Config(transports=(request.param,))
    with te.Engine(config) as source, te.Engine(config) as target:
        pair = Pair(source, target, 4 << 20)
        assert pair.peer.transport == request.param
        yield pair


def test_pages_land_and_nothing_else_changes(pair: Pair) -> None:
    pages = np.random.default_rng(2).permutation(64)
    layers = np.arange(4) * (1 << 20)
    blocks = te.Blocks.pages(
        pair.src.ctypes.data + layers, pages, 4096, pair.dst.ctypes.data + layers, pages[::-1],
        4100, 4096,
    )  # fmt: skip
    expected = pair.dst.copy()
    for layer in layers:
        for one, two in zip(pages, pages[::-1], strict=True):
            start = layer + two * 4100
            expected[start : start + 4096] = pair.src[layer + one * 4096 :][:4096]
    pair.target.expect(9)
    transfer = pair.peer.write(blocks, tag=9)
    assert transfer.wait(TIMEOUT_S) is te.Status.DONE
    assert (pair.dst == expected).all()
    assert pair.target.arrived(9) == 1
    assert transfer.nbytes == blocks.total_nbytes == 1 << 20
    assert transfer.reason is None
    assert transfer.duration_s > 0


@pytest.mark.parametrize("nbytes", [1, 2, 4095, 65536, 65537, (1 << 20) + 1, 4 << 20])
def test_every_size(pair: Pair, nbytes: int) -> None:
    pair.peer.write(pair.blocks(0, 0, nbytes)).wait(TIMEOUT_S)
    assert (pair.dst[:nbytes] == pair.src[:nbytes]).all()
    assert (pair.dst[nbytes:] == 0xEE).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_blocks_larger_than_segments_and_more_than_iovecs(transport: str) -> None:
    config = te.Config(segment_bytes=5000, segment_blocks=7, transports=(transport,))
    with te.Engine(config) as source, te.Engine() as target:
        pair = Pair(source, target, 300_000)
        offsets = np.arange(100) * 1500
        sizes = np.arange(100) * 14 + 1
        blocks = te.Blocks.concat(
            [pair.blocks(offsets, offsets[::-1], sizes), pair.blocks(150_000, 150_000, 100_000)]
        )
        expected = pair.dst.copy()
        for one, two, size in zip(offsets, offsets[::-1], sizes, strict=True):
            expected[two : two + size] = pair.src[one : one + size]
        expected[150_000:250_000] = pair.src[150_000:250_000]
        pair.peer.write(blocks).wait(TIMEOUT_S)
        assert (pair.dst == expected).all()


def test_fifty_thousand_small_blocks(pair: Pair) -> None:
    offsets = np.random.default_rng(3).permutation(50_000) * 60
    pair.peer.write(pair.blocks(offsets, offsets, 33)).wait(TIMEOUT_S)
    inside = np.zeros(len(pair.dst), bool)
    inside[(np.sort(offsets)[:, None] + np.arange(33)).reshape(-1)] = True
    assert (pair.dst[inside] == pair.src[inside]).all()
    assert (pair.dst[~inside] == 0xEE).all()


@pytest.mark.parametrize("count", [1023, 1024, 1025, 5000])
def test_tiny_blocks_that_need_several_frames(pair: Pair, count: int) -> None:
    """So few bytes that the caller sends them itself, but more blocks than one frame has."""
    offsets = np.arange(count) * 3
    pair.peer.write(pair.blocks(offsets, offsets, 2)).wait(TIMEOUT_S)
    inside = (np.arange(len(pair.dst)) % 3 < 2) & (np.arange(len(pair.dst)) < count * 3)
    assert (pair.dst == np.where(inside, pair.src, 0xEE)).all()


def test_nothing_is_a_transfer_too(pair: Pair) -> None:
    pair.target.expect(4)
    transfer = pair.peer.write(te.Blocks.of([], [], []), tag=4)
    assert transfer.wait(TIMEOUT_S) is te.Status.DONE
    assert pair.target.arrived(4) == 1


def test_refused_ranges_leave_memory_and_connection_alone(pair: Pair) -> None:
    outside = te.Blocks.concat([pair.blocks(0, 0, 64), pair.blocks(0, len(pair.dst) - 10, 11)])
    with pytest.raises(te.TransferFailed, match=r"refused: .* 11 bytes at 0x\w+ lie outside"):
        pair.peer.write(outside).wait(TIMEOUT_S)
    assert (pair.dst == 0xEE).all()
    with pytest.raises(te.BoundsError, match=r"lie outside .* the nearest of 1 regions"):
        pair.peer.write(pair.blocks(len(pair.src) - 10, 0, 11))
    assert pair.peer.write(pair.blocks(0, 0, 64)).wait(TIMEOUT_S) is te.Status.DONE
    assert pair.peer.alive


def test_refusal_stops_a_long_transfer_early(pair: Pair) -> None:
    offsets = np.concatenate([[len(pair.dst) - 5], np.arange(1000) * 4000])
    transfer = pair.peer.write(pair.blocks(np.arange(1001) * 4000, offsets, 4000))
    with pytest.raises(te.TransferFailed, match="refused"):
        transfer.wait(TIMEOUT_S)
    # Other rails may have brought later segments before; of the refused one nothing lands. Over
    # RDMA the transfer is looked at as a whole.
    untouched = len(pair.dst) if pair.peer.transport == "rdma" else 60 * 4000
    assert (pair.dst[:untouched] == 0xEE).all()
    assert pair.peer.write(pair.blocks(0, 0, 1)).wait(TIMEOUT_S) is te.Status.DONE


def test_tags_that_are_not_open_are_refused(pair: Pair) -> None:
    for _ in range(2):
        for blocks in (pair.blocks(0, 0, 100), te.Blocks.of([], [], [])):
            with pytest.raises(te.TransferFailed, match="tag 0x5 is not open here"):
                pair.peer.write(blocks, tag=5).wait(TIMEOUT_S)
        pair.target.expect(5)
        assert pair.target.fence(5) == 0
    assert (pair.dst == 0xEE).all()
    pair.target.expect(5)
    pair.peer.write(pair.blocks(0, 0, 100), tag=5).wait(TIMEOUT_S)
    assert pair.target.fence(5) == 1
    assert pair.target.arrived(5) == 0
    with pytest.raises(ValueError, match="between 1 and"):
        pair.peer.write(pair.blocks(0, 0, 1), tag=-1)


def test_the_bytes_that_arrived_are_those_of_the_transfers_counted(pair: Pair) -> None:
    assert pair.target.arrived_nbytes(5) == 0
    pair.target.expect(5)
    pair.target.expect(6)
    sizes = (1, 100, 70_000, 3 << 20, 0)
    for nbytes in sizes:
        blocks = pair.blocks(0, 0, nbytes) if nbytes else te.Blocks.of([], [], [])
        pair.peer.write(blocks, tag=5).wait(TIMEOUT_S)
    outside = te.Blocks.concat([pair.blocks(0, 0, 64), pair.blocks(0, len(pair.dst) - 10, 11)])
    with pytest.raises(te.TransferFailed, match="refused"):
        pair.peer.write(outside, tag=5).wait(TIMEOUT_S)
    assert (pair.target.arrived(5), pair.target.arrived_nbytes(5)) == (len(sizes), sum(sizes))
    assert (pair.target.arrived(6), pair.target.arrived_nbytes(6)) == (0, 0)
    pair.target.fence(5)
    assert pair.target.arrived_nbytes(5) == 0
    assert pair.target.arrived_nbytes(-1) == pair.target.arrived_nbytes(1 << 64) == 0


def test_one_peer_per_engine_until_it_dies(pair: Pair) -> None:
    assert pair.source.connect(pair.target.card()) is pair.peer
    assert pair.source.stats().peers == 1
    pair.peer.close()
    wait_until(lambda: not pair.peer.alive, "dead")
    with pytest.raises(te.TransferFailed, match="closed by its application"):
        pair.peer.write(pair.blocks(0, 0, 1)).wait(TIMEOUT_S)
    again = pair.source.connect(pair.target.card())
    assert again is not pair.peer
    assert again.write(pair.blocks(0, 0, 1)).wait(TIMEOUT_S) is te.Status.DONE


def test_threads_connecting_at_once_get_one_peer() -> None:
    with te.Engine() as source, te.Engine() as target:
        card, peers = target.card(), []
        threads = [
            threading.Thread(target=lambda: peers.append(source.connect(card))) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(peers) == 8
        assert len(set(peers)) == 1
        wait_until(lambda: source.stats().rails == peers[0].rails == 2, "only one link is left")


def test_an_engine_can_write_to_itself() -> None:
    with te.Engine() as engine:
        buffer = pattern(1, 2000)
        engine.register(buffer, remote="read-write")
        base = buffer.ctypes.data
        engine.connect(engine.card()).write(te.Blocks.of(base, base + 1000, 1000)).wait(TIMEOUT_S)
        assert (buffer[1000:] == buffer[:1000]).all()


def test_ipv6() -> None:
    config = te.Config(host="::1", transports=("tcp",))
    with te.Engine() as source, te.Engine(config) as target:
        pair = Pair(source, target, 1000)
        pair.peer.write(pair.blocks(0, 0, 1000)).wait(TIMEOUT_S)
        assert (pair.dst == pair.src).all()
        assert pair.peer.address[0] == "::1"


def test_several_threads_submit_at_once(pair: Pair) -> None:
    pair.target.expect(6)
    per_thread, nbytes = 40, 1000

    def submit(thread: int) -> None:
        transfers = []
        for i in range(per_thread):
            offset = (thread * per_thread + i) * nbytes
            transfers.append(pair.peer.write(pair.blocks(offset, offset, nbytes), tag=6))
        for transfer in transfers:
            transfer.wait(TIMEOUT_S)

    threads = [threading.Thread(target=submit, args=[i]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    total = 8 * per_thread * nbytes
    assert pair.target.arrived(6) == 8 * per_thread
    assert (pair.dst[:total] == pair.src[:total]).all()
    assert (pair.dst[total:] == 0xEE).all()
    assert pair.source.stats().transfers_done == 8 * per_thread
    assert pair.source.stats().bytes_sent == pair.target.stats().bytes_received == total


def test_callbacks_may_write_and_await_works(pair: Pair) -> None:
    async def main() -> None:
        first, second = pair.blocks(0, 0, 10), pair.blocks(10, 10, 10)
        followed: asyncio.Future[te.Transfer] = asyncio.get_running_loop().create_future()

        def follow(_: te.Transfer) -> None:
            transfer = pair.peer.write(second)
            followed.get_loop().call_soon_threadsafe(followed.set_result, transfer)

        transfer = pair.peer.write(first)
        transfer.add_done_callback(follow)
        assert await transfer is te.Status.DONE
        assert await (await followed) is te.Status.DONE

    asyncio.run(main())
    assert (pair.dst[:20] == pair.src[:20]).all()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_touching_regions_are_one_range_of_memory(transport: str) -> None:
    """Layers that lie back to back: merging makes blocks that run over their border."""
    config = te.Config(transports=(transport,))
    with te.Engine(config) as source, te.Engine(config) as target:
        src, dst = pattern(1, 4000), np.zeros(4000, np.uint8)
        regions = [source.register(src.ctypes.data + i, 1000) for i in range(0, 4000, 1000)]
        for offset in range(0, 4000, 1000):
            target.register(dst.ctypes.data + offset, 1000, remote="read-write")
        pages = np.arange(8)
        blocks = te.Blocks.pages(src.ctypes.data, pages, 500, dst.ctypes.data, pages, 500, 500)
        assert len(blocks.merged()) == 1
        peer = source.connect(target.card())
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (src == dst).all()
        too_long = te.Blocks.of(src.ctypes.data, dst.ctypes.data + 1, 4000)
        with pytest.raises(te.TransferFailed, match=r"4000 bytes at .* the nearest of 4 regions"):
            peer.write(too_long).wait(TIMEOUT_S)
        for region in regions:
            source.deregister(region)


def test_deregistered_memory_is_out_of_reach(pair: Pair) -> None:
    pair.target.deregister(pair.dst_region)
    with pytest.raises(te.TransferFailed, match="nothing is registered"):
        pair.peer.write(pair.blocks(0, 0, 10)).wait(TIMEOUT_S)
    with pytest.raises(te.RegistrationError, match="not registered"):
        pair.target.deregister(pair.dst_region)
    pair.target.register(pair.dst, remote="read-write")
    pair.peer.write(pair.blocks(0, 0, 10)).wait(TIMEOUT_S)
    pair.source.deregister(pair.src_region)
    with pytest.raises(te.BoundsError, match="nothing is registered"):
        pair.peer.write(pair.blocks(0, 0, 10))
    assert (pair.dst[10:] == 0xEE).all()


def test_fence_peer_drops_its_connections(pair: Pair) -> None:
    assert pair.target.fence_peer(pair.source.id) == 1
    wait_until(lambda: not pair.peer.alive, "dead")
    wait_until(lambda: pair.target.stats().rails == 0, "dropped")
    assert pair.target.fence_peer(pair.source.id) == 0
    again = pair.source.connect(pair.target.card())
    assert again.write(pair.blocks(0, 0, 10)).wait(TIMEOUT_S) is te.Status.DONE


@contextmanager
def unanswered_write() -> Iterator[tuple[te.Engine, te.Peer, te.Region, te.Transfer]]:
    """A write to a destination that says nothing after its welcome."""
    with raw_destination() as (listener, card), te.Engine() as source:
        connected: list[te.Peer] = []
        thread = threading.Thread(target=lambda: connected.append(source.connect(card)))
        thread.start()
        sock, _ = listener.accept()
        with sock:
            sock.sendall(welcome(take_hello(sock)))
            thread.join(TIMEOUT_S)
            region = source.register(bytearray(100))
            transfer = connected[0].write(te.Blocks.of(region.address, 1, 100))
            yield source, connected[0], region, transfer


def test_closing_fails_what_is_unfinished_and_is_idempotent() -> None:
    with unanswered_write() as (source, peer, region, transfer):
        with pytest.raises(te.RegistrationError, match="1 unfinished transfers read from"):
            source.deregister(region)
        source.close()
        with pytest.raises(te.TransferFailed, match="this engine was closed"):
            transfer.wait(TIMEOUT_S)
        source.deregister(region)
        source.close()
    with pytest.raises(te.ClosedError):
        source.card()
    with pytest.raises(te.TransferFailed, match="this engine was closed"):
        peer.write(te.Blocks.of([], [], [])).wait(TIMEOUT_S)


def test_threads_end_with_the_engine(pair: Pair) -> None:
    names = {f"te-accept-{pair.target.id[:8]}", f"te-worker-{pair.target.id[:8]}-0"}
    assert names <= {thread.name for thread in threading.enumerate()}
    pair.target.close()
    assert not names & {thread.name for thread in threading.enumerate()}


def descriptors() -> set[int]:
    """Those that this process has open."""
    found = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    return {fd for fd in found if os.path.lexists(f"/proc/self/fd/{fd}")}


def test_a_callback_whose_thread_cannot_start_is_refused_and_taken_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    told: list[str] = []
    with unanswered_write() as (source, _, _, transfer):
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                transfer.add_done_callback(lambda _: told.append("refused"))
        transfer.add_done_callback(lambda _: told.append("taken"))
        source.close()
    assert told == ["taken"]


def test_an_engine_that_cannot_start_a_thread_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if re.fullmatch(r"te-worker-\w+-1", thread.name):
            raise RuntimeError("can't start new thread")
        start(thread)

    gc.collect()
    threads, before = set(threading.enumerate()), descriptors()
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refuse)
        without.setattr("os.cpu_count", lambda: 2)
        with pytest.raises(RuntimeError, match="can't start"):
            te.Engine()
    assert set(threading.enumerate()) <= threads
    gc.collect()
    assert descriptors() <= before


@pytest.mark.parametrize("spare", range(8))
def test_a_plane_without_descriptors_closes_none_that_is_not_its_own(spare: int) -> None:
    """Descriptor 0 is this process's standard input."""
    gc.collect()
    before, standard_input = descriptors(), os.fstat(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(max(before) + 10)) - before)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
    try:
        with pytest.raises(OSError, match="no descriptor for an engine"):
            Plane(4, 1.0, 1.0, 0.0, 1 << 20, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    gc.collect()
    assert os.path.samestat(os.fstat(0), standard_input)
    assert descriptors() <= before


def test_a_callback_may_close_the_engine(pair: Pair) -> None:
    transfer = pair.peer.write(pair.blocks(0, 0, 10))
    closed = threading.Event()

    def close(_: te.Transfer) -> None:
        pair.source.close()
        closed.set()

    transfer.add_done_callback(close)
    transfer.wait(TIMEOUT_S)
    assert closed.wait(TIMEOUT_S)
    with pytest.raises((te.ClosedError, te.TransferFailed)):
        pair.source.connect(pair.target.card()).write(pair.blocks(0, 0, 1)).wait(TIMEOUT_S)


def test_taken_port_and_unknown_host() -> None:
    with te.Engine() as engine:
        port = engine.connect(engine.card()).address[1]
        with pytest.raises(te.ListenError, match=f"127.0.0.1:{port}: Address already in use"):
            te.Engine(te.Config(port=port))
    with pytest.raises(te.ListenError, match=r"no\.such\.host\.invalid"):
        te.Engine(te.Config(host="no.such.host.invalid"))
