# SPDX-License-Identifier: Apache-2.0
"""What the data plane adds: rails, reads, shared memory, many blocks, many peers, transports."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from te_far import pattern, wait_until
from te_frames import Kind, descriptors
from te_raw import RawSource
from te_transports import TRANSPORTS

import te
from te.connect.pool import THREADS_MAX
from te.handshake import decode_card, encode

TIMEOUT_S = 60.0
#: Of all engines: a thread may stand still for seconds.
PATIENT = te.Config(connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)
NBYTES = 8 << 20


class Two:
    """A source and a target engine, with memory on both sides."""

    def __init__(self, source: te.Engine, target: te.Engine, nbytes: int = NBYTES) -> None:
        self.source, self.target = source, target
        self.src, self.dst = pattern(1, nbytes), np.full(nbytes, 0xEE, np.uint8)
        self.src_region, self.dst_region = (
            source.register(self.src),
            target.register(self.dst, remote="read-write"),
        )
        self.peer = source.connect(target.card())

    def blocks(self, src: object, dst: object, nbytes: object) -> te.Blocks:
        """Blocks from offsets."""
        src_address = self.src_region.address + np.asarray(src, np.uint64)
        dst_address = self.dst_region.address + np.asarray(dst, np.uint64)
        return te.Blocks.of(src_address, dst_address, nbytes)  # type: ignore[arg-type]


@contextlib.contextmanager
def two(nbytes: int = NBYTES, **config: object) -> Iterator[Two]:
    settings = replace(PATIENT, **config)  # type: ignore[arg-type]
    with te.Engine(settings) as source, te.Engine(settings) as target:
        yield Two(source, target, nbytes)


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Two]:
    with two(transports=(request.param,), segment_bytes=1 << 18) as pair:
        assert pair.peer.transport == request.param
        yield pair


# -- rails


@pytest.mark.parametrize("rails", [1, 2, 5])
def test_every_rail_of_a_peer_carries_bytes(rails: int) -> None:
    with two(transports=("tcp",), rails=rails, segment_bytes=1 << 16) as pair:
        assert pair.peer.rails == rails
        wait_until(lambda: pair.target.stats().rails == rails, "all rails are accepted")
        pair.target.expect(3)
        for _ in range(4):
            pair.peer.write(pair.blocks(0, 0, NBYTES), tag=3).wait(TIMEOUT_S)
        assert (pair.src == pair.dst).all()
        assert pair.target.arrived(3) == 4


def test_the_smaller_number_of_rails_counts() -> None:
    four, three = replace(PATIENT, rails=4), replace(PATIENT, rails=3)
    with te.Engine(four) as source, te.Engine(three) as target:
        assert source.connect(target.card()).rails == 3
        assert target.connect(source.card()).rails == 3


# -- reads


# -- memory that was allocated for sharing


@pytest.mark.parametrize("connect_first", [False, True])
def test_allocated_memory_is_mapped_by_the_peer(connect_first: bool) -> None:
    with te.Engine(PATIENT) as source, te.Engine(PATIENT) as target:
        buffer = te.allocate(NBYTES)
        src, dst = np.frombuffer(buffer, np.uint8), np.zeros(NBYTES, np.uint8)
        src[:NBYTES] = pattern(1, NBYTES)
        if connect_first:
            source.connect(target.card())
        region, remote = source.register(buffer), target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        offsets = np.random.default_rng(1).permutation(1000) * 8000
        blocks = te.Blocks.of(region.address + offsets, remote.address + offsets[::-1], 7777)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        expected = np.zeros(NBYTES, np.uint8)
        for one, other in zip(offsets, offsets[::-1], strict=True):
            expected[other : other + 7777] = src[one : one + 7777]
        assert (dst == expected).all()


def test_the_address_of_allocated_memory_can_be_used_anew() -> None:
    """The peer must not copy out of what it had mapped there before."""
    with te.Engine(PATIENT) as source, te.Engine(PATIENT) as target:
        dst = np.zeros(4096, np.uint8)
        remote = target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        first, second = te.allocate(4096), te.allocate(4096)
        for buffer, value in ((first, 1), (second, 2), (first, 3)):
            view = np.frombuffer(buffer, np.uint8)
            view[:] = value
            region = source.register(buffer)
            assert peer.write(te.Blocks.of(region.address, remote.address, 4096)).wait(TIMEOUT_S)
            assert (dst == value).all()
            source.deregister(region)
        # Private memory in place of the shared.
        address = region.address
        private = source.register(address, 4096)
        view[:] = 9
        assert peer.write(te.Blocks.of(private.address, remote.address, 4096)).wait(TIMEOUT_S)
        assert (dst == 9).all()
        assert peer.alive


def test_nobody_else_can_write_allocated_memory() -> None:
    """A peer on the same host has its descriptor."""
    buffer = te.allocate(4096)
    with pytest.raises(PermissionError):
        mmap.mmap(buffer.fd, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(buffer.fd, b"x", 0)
    there = mmap.mmap(buffer.fd, 4096, prot=mmap.PROT_READ)
    buffer[:5] = b"still"
    assert there[:5] == b"still"


def test_allocate_says_what_it_gives() -> None:
    buffer = te.allocate(5000)
    assert len(buffer) >= 5000
    assert "bytes" in repr(buffer)
    assert not np.frombuffer(buffer, np.uint8).any()
    with pytest.raises(ValueError, match="nbytes=0"):
        te.allocate(0)


# -- how a transport is chosen


NO_RDMA_THERE = "rdma: the other engine does not offer it"


def test_the_same_host_is_noticed_and_tcp_is_the_way_out() -> None:
    with (
        te.Engine(PATIENT) as source,
        te.Engine(PATIENT) as target,
        te.Engine(replace(PATIENT, transports=("tcp",))) as plain,
    ):
        near, far = source.connect(target.card()), source.connect(plain.card())
        assert (near.transport, near.transport_reason) == ("samehost", "")
        not_there = f"samehost: the other engine does not offer it; {NO_RDMA_THERE}"
        assert (far.transport, far.transport_reason) == ("tcp", not_there)
        assert source.stats().peer_transports == {
            target.id: ("samehost", ""), plain.id: ("tcp", not_there)
        }  # fmt: skip


def test_why_the_same_host_is_not_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(PATIENT, transports=("samehost", "tcp"))
    with te.Engine(config) as source, te.Engine(PATIENT) as target:
        monkeypatch.setattr(
            "te.transports.samehost.reach.cannot_read", lambda pid, nonce: "not today"
        )
        peer = source.connect(target.card())
        assert (peer.transport, peer.transport_reason) == ("tcp", "samehost: not today")
        with (
            te.Engine(replace(PATIENT, transports=("samehost",))) as strict,
            pytest.raises(te.ConnectError, match=r"no transport to .* samehost: not today"),
        ):
            strict.connect(target.card())


def test_why_rdma_is_not_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fabric(*_wanted: object) -> None:
        raise te.DeviceError("the cable is out")

    with monkeypatch.context() as without:
        without.setattr("te.transports.rdma.transport.open_fabric", open_fabric)
        source = te.Engine(replace(PATIENT, transports=("rdma", "tcp")))
    with source, te.Engine(PATIENT) as target:
        card = structs.replace(decode_card(target.card()), offers={"rdma": b"", "tcp": b""})
        peer = source.connect(encode(card))
        assert (peer.transport, peer.transport_reason) == ("tcp", "rdma: the cable is out")


@pytest.mark.parametrize("transports", [te.Config.transports, ("rdma",)])
def test_a_topology_that_cannot_be_used_stops_the_engine(
    tmp_path: Path, transports: tuple[str, ...]
) -> None:
    file = tmp_path / "topology.json"
    config = te.Config(topology=file, transports=transports)
    with pytest.raises(te.TopologyError, match=r"cannot read .*topology.json: No such file"):
        te.Engine(config)
    file.write_bytes(b"\xff")
    with pytest.raises(te.TopologyError, match=r"cannot read .*topology.json: 'utf-8'"):
        te.Engine(config)
    file.write_text("[]")
    with pytest.raises(te.TopologyError, match="is not JSON of the form"):
        te.Engine(config)
    file.write_text('{"*": [["no_such_device"]]}')
    with pytest.raises(te.TopologyError, match=r"gives \* the NIC 'no_such_device'; there are"):
        te.Engine(config)


def test_a_pull_on_tcp_and_a_read_of_nothing_registered_are_no_way_in() -> None:
    with te.Engine(PATIENT) as target:
        source = RawSource(target.card())
        with source.sock:
            source.send(descriptors(Kind.READ, 1, [(1 << 20, 1 << 20, 100)]))
            assert "nothing is registered" in source.ack().reason
            source.send(descriptors(Kind.PULL, 2, [(1 << 20, 1 << 20, 100)]))
            assert source.closed()


# -- many


@pytest.mark.slow
def test_a_million_blocks_in_one_call(pair: Two) -> None:
    count, step = 1_000_000, 8
    offsets = np.random.default_rng(5).permutation(count) * step
    blocks = pair.blocks(offsets, offsets, 5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    transfer = pair.peer.write(blocks)
    assert transfer.wait(TIMEOUT_S) is te.Status.DONE
    extra_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert extra_bytes < 64 * count
    src, dst = pair.src.reshape(-1, step)[:count], pair.dst.reshape(-1, step)[:count]
    assert (src[:, :5] == dst[:, :5]).all()
    assert (dst[:, 5:] == 0xEE).all()


def threads_of(engine: te.Engine) -> int:
    return sum(engine.id[:8] in one.name for one in threading.enumerate())


def connect(source: te.Engine, target: te.Engine, transport: str) -> te.Peer:
    """Over RDMA again and again: siw's library now and then makes no queue pair on a loaded machine
    ("Resource temporarily unavailable")."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return source.connect(target.card())
        except te.ConnectError:
            if transport != "rdma" or time.monotonic() > deadline_s:
                raise


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_peers_and_sixteen_transfers_each(transport: str) -> None:
    # An emulated machine takes 0.8 s of a processor for a peer.
    peers, each, nbytes = 16 if transport == "rdma" else 64, 16, 5000
    config = replace(PATIENT, transports=(transport,))
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(te.Engine(config)) for _ in range(peers)]
        source = stack.enter_context(te.Engine(config))
        per_engine = threads_of(source)
        assert per_engine <= 4
        src, dst = pattern(2, each * nbytes), np.zeros((peers, each * nbytes), np.uint8)
        region = source.register(src)
        remotes = [target.register(dst[i], remote="read-write") for i, target in enumerate(targets)]
        connected = [connect(source, target, transport) for target in targets]
        # The threads that make rails come on top. A target has looked into who its peer is.
        assert threads_of(source) <= per_engine + (THREADS_MAX if transport == "rdma" else 0)
        for target, peer in zip(targets, connected, strict=True):
            looking = THREADS_MAX if transport == "rdma" else peer.rails
            assert threads_of(target) <= per_engine + looking
        for target in targets:
            target.expect(1)
        transfers = [
            peer.write(
                te.Blocks.of(region.address + i * nbytes, remote.address + i * nbytes, nbytes),
                tag=1,
            )
            for i in range(each)
            for peer, remote in zip(connected, remotes, strict=True)
        ]
        for transfer in transfers:
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == src).all()
        assert {target.arrived(1) for target in targets} == {each}
