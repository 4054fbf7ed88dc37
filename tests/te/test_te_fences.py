# SPDX-License-Identifier: Apache-2.0
"""Fences whose landings do not end in time: they say so each time, until they are confirmed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import numpy as np
import pytest
from te_contract import cancel
from te_far import pattern, wait_until
from te_frames import HEADER, Ack, AckStatus, Kind, header
from te_frozen import FrozenMemory, frozen_memory
from te_raw import RawSource

import te
from te.topology import ANYWHERE, Locality, Topology
from te.transports.base import Transport
from te.transports.rdma.transport import Rdma
from te.verbs import _core as verbs
from te.verbs.fabric import Fabric, Nic
from te_bench._null import Device, Wires

pytestmark = pytest.mark.userfaultfd

TIMEOUT_S = 60.0
NBYTES = 1 << 16
#: What is frozen is not to count as stalled.
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
SAMEHOST = te.Config(transports=("samehost",), **PATIENT)
#: Of what is not to end in time.
SHORT_S = 0.5
#: Of what cannot end before its test lets it: however soon that is told, it is true.
SOON_S = 0.05


class NullEngine(te.Engine):
    """With an RDMA device that moves nothing."""

    def _transport(self, name: str) -> Transport:
        if name != "rdma":
            return super()._transport(name)
        nic = Nic(
            index=0,
            name="null0",
            port=1,
            device=cast(verbs.Device, Device(Wires())),
            family="ib",
            gids=(),
            lid=1,
            mtu=5,
            max_message_bytes=1 << 30,
            max_region_bytes=1 << 62,
            netdev="",
            bytes_per_s=0.0,
        )
        topology = Topology((), {ANYWHERE: Locality((nic.name,))}, gpus={}, far={})
        return Rdma(self._config, Fabric((nic,), topology, (0,)))


class Frozen:
    """A write under `TAG`, from a source on this host, that waits for a page of the source."""

    TAG = 7

    def __init__(self, target: te.Engine, source: te.Engine, memory: FrozenMemory) -> None:
        self.target, self.source, self.memory = target, source, memory
        self.content = pattern(3, memory.nbytes)
        self.dst = np.full(memory.nbytes, 0xEE, np.uint8)
        source.register(memory.address, memory.nbytes)
        self.region = target.register(self.dst, remote="read-write")
        self.peer = source.connect(target.card())
        wait_until(lambda: target.stats().rails >= self.peer.rails, "all rails are accepted")
        target.expect(self.TAG)
        blocks = te.Blocks.of(memory.address, self.region.address, memory.nbytes)
        self.transfer = self.peer.write(blocks, tag=self.TAG)
        memory.wait_until_touched()

    def serve(self) -> None:
        self.memory.serve(self.content)


@contextlib.contextmanager
def frozen_write(target: te.Engine) -> Iterator[Frozen]:
    with te.Engine(SAMEHOST) as source, frozen_memory(NBYTES) as memory:
        yield Frozen(target, source, memory)


def answer(source: RawSource) -> Ack:
    """The next acknowledgement to a source over RDMA: words about its rails come in between."""
    while True:
        data = source.sock.recv(HEADER.size, socket.MSG_WAITALL)
        kind, status, _, count, transfer, _, _, _ = HEADER.unpack(data)
        size = {Kind.ACK: count, Kind.TABLE: 48 * count}.get(kind, 0)
        body = source.sock.recv(size, socket.MSG_WAITALL) if size else b""
        if kind == Kind.ACK:
            return Ack(transfer, AckStatus(status), body.decode())


def test_a_fence_that_is_not_confirmed_says_so_each_time() -> None:
    with te.Engine(SAMEHOST) as target, frozen_write(target) as frozen:
        for _ in range(2):
            with pytest.raises(te.FenceTimeout, match=r"tag 0x7: .* call fence again"):
                target.fence(7, SOON_S)
            with pytest.raises(ValueError, match="tag 0x7 is being fenced"):
                target.expect(7)
        frozen.serve()
        assert target.fence(7, TIMEOUT_S) == 0
        frozen.dst[:] = 0xCA
        with pytest.raises(te.TransferFailed, match="the tag 0x7 was fenced"):
            frozen.transfer.wait(TIMEOUT_S)
        assert (frozen.dst == 0xCA).all()
        assert target.fence(7, TIMEOUT_S) == 0
        target.expect(7)
        blocks = te.Blocks.of(frozen.memory.address, frozen.region.address, NBYTES)
        assert frozen.peer.write(blocks, tag=7).wait(TIMEOUT_S) is te.Status.DONE
        assert (frozen.dst == frozen.content).all()
        assert target.fence(7, TIMEOUT_S) == 1


def test_a_revoked_tag_is_asked_about_without_waiting() -> None:
    with te.Engine(SAMEHOST) as target, frozen_write(target) as frozen:
        fence = target.revoke(7)
        assert fence is not None
        assert not fence.poll()
        assert repr(fence) == "Fence(tag 0x7, revoked)"
        target.expect(8)
        other = target.revoke(8)
        assert other is not None
        assert other.poll(), "a copy that hangs is no other tag's"
        assert other.wait() == 0
        again = target.revoke(7)  # While it is being closed, each who asks gets a fence.
        assert again is not None
        frozen.serve()
        wait_until(fence.poll, "the copy has ended")
        assert repr(fence) == "Fence(tag 0x7, closed)"
        assert again.poll()
        assert fence.wait() == again.wait() == 0
        assert target.revoke(7) is None


def fences_of_two_threads(target: te.Engine, serve: Callable[[], None]) -> list[int]:
    """Has them fence the tag 7 until both have heard that it is not confirmed; then has it
    confirmed. What they return: never before that."""
    served = threading.Event()
    timeouts: list[int] = []
    counts: list[int] = []

    def fence(number: int) -> None:
        while True:
            try:
                count = target.fence(7, SOON_S)
            except te.FenceTimeout:
                timeouts.append(number)
                continue
            assert served.is_set(), "the fence returned before it was confirmed"
            counts.append(count)
            return

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        done = [pool.submit(fence, number) for number in range(2)]
        wait_until(lambda: set(timeouts) == {0, 1} or any(one.done() for one in done), "timeouts")
        served.set()
        serve()
        for one in done:
            one.result(TIMEOUT_S)
    return counts


def test_threads_that_fence_one_tag_all_wait_for_its_landing() -> None:
    with te.Engine(SAMEHOST) as target, frozen_write(target) as frozen:
        assert fences_of_two_threads(target, frozen.serve) == [0, 0]


def test_a_source_whose_page_is_frozen_holds_up_its_own_fence_alone() -> None:
    with (
        te.Engine(SAMEHOST) as target,
        frozen_write(target) as frozen,
    ):
        target.expect(8)
        assert target.fence(8, TIMEOUT_S) == 0
        with pytest.raises(te.FenceTimeout):
            target.fence(frozen.TAG, SOON_S)
        frozen.serve()
        assert target.fence(frozen.TAG, TIMEOUT_S) == 0


def test_other_peers_fences_go_on_beside_a_frozen_page() -> None:
    config = te.Config(transports=("samehost", "tcp"), **PATIENT)
    with te.Engine(config) as target, te.Engine(config) as other:
        src, dst = pattern(1, NBYTES), np.zeros(NBYTES, np.uint8)
        near, far = other.register(src), target.register(dst, remote="read-write")
        peer = other.connect(target.card())
        target.expect(8)
        blocks = te.Blocks.of(near.address, far.address, NBYTES)
        assert peer.write(blocks, tag=8).wait(TIMEOUT_S) is te.Status.DONE
        with frozen_write(target) as frozen:
            assert target.fence(8, TIMEOUT_S) == 1
            frozen.serve()


def test_a_tag_is_fenced_though_its_link_has_died_in_the_middle_of_a_landing() -> None:
    with te.Engine(SAMEHOST) as target, frozen_write(target) as frozen:
        frozen.peer.close()
        # One of its connections is in the hands of a worker that waits for the page.
        wait_until(lambda: target.stats().rails == 1, "the others are closed")
        for _ in range(2):
            with pytest.raises(te.FenceTimeout):
                target.fence(frozen.TAG, SOON_S)
        frozen.serve()
        wait_until(lambda: target.stats().rails == 0, "all are closed")
        assert target.fence(frozen.TAG, TIMEOUT_S) == 0


@contextlib.contextmanager
def worker_that_waits(engine: te.Engine) -> Iterator[Callable[[], None]]:
    """The engine's only worker reads a frozen page that it is to send, which is no landing; the
    function serves the page."""
    with (
        te.Engine(te.Config(transports=("tcp",), **PATIENT)) as far,
        frozen_memory(4 * NBYTES) as memory,
    ):
        dst = np.zeros(memory.nbytes, np.uint8)
        region = far.register(dst, remote="read-write")
        engine.register(memory.address, memory.nbytes)
        blocks = te.Blocks.of(memory.address, region.address, memory.nbytes)
        transfer = engine.connect(far.card()).write(blocks)
        memory.wait_until_touched()
        yield lambda: memory.serve(pattern(1, memory.nbytes))
        assert transfer.wait(TIMEOUT_S) is te.Status.DONE


def test_a_grant_over_rdma_holds_the_fence_until_its_rails_are_broken() -> None:
    with NullEngine(te.Config(transports=("rdma", "tcp"), workers=1, **PATIENT)) as target:
        source = RawSource(target.card(), "rdma")
        with source.sock:
            assert isinstance(source.sock, socket.socket)
            target.expect(9)
            source.send(header(Kind.ASK, count=1, transfer=1, tag=9, total=100))
            assert answer(source).status is AckStatus.GRANTED
            with worker_that_waits(target) as serve:
                fence = target.revoke(9)
                assert fence is not None
                assert not fence.poll()
                assert not fence.poll(), "the source is asked to stop once"
                for _ in range(2):
                    with pytest.raises(te.FenceTimeout):
                        target.fence(9, SOON_S)
                    with pytest.raises(ValueError, match="tag 0x9 is being fenced"):
                        target.expect(9)
                serve()
                assert target.fence(9, TIMEOUT_S) == 0
                assert fence.poll()
                target.expect(9)
            assert "fenced" in answer(source).reason


def test_threads_that_fence_a_granted_tag_all_wait_for_its_rails() -> None:
    with NullEngine(te.Config(transports=("rdma", "tcp"), workers=1, **PATIENT)) as target:
        source = RawSource(target.card(), "rdma")
        with source.sock:
            assert isinstance(source.sock, socket.socket)
            target.expect(7)
            source.send(header(Kind.ASK, count=1, transfer=1, tag=7, total=100))
            assert answer(source).status is AckStatus.GRANTED
            with worker_that_waits(target) as serve:
                assert fences_of_two_threads(target, serve) == [0, 0]


@pytest.mark.slow
def test_a_cancelled_read_is_not_over_while_something_of_it_lands() -> None:
    with (
        te.Engine(SAMEHOST) as reader,
        te.Engine(SAMEHOST) as far,
        frozen_memory(NBYTES) as memory,
    ):
        dst = np.full(NBYTES, 0xEE, np.uint8)
        region = reader.register(dst)
        far.register(memory.address, NBYTES, remote="read-write")
        peer = reader.connect(far.card())
        read = peer.read(te.Blocks.of(memory.address, region.address, NBYTES))
        memory.wait_until_touched()
        for _ in range(2):
            with pytest.raises(te.FenceTimeout, match="call cancel again"):
                read.cancel()
            assert read.poll() is te.Status.PENDING
        memory.serve(pattern(3, NBYTES))
        cancel(read)
        dst[:] = 0xCA
        assert read.wait(TIMEOUT_S) is te.Status.CANCELLED
        again = peer.read(te.Blocks.of(memory.address, region.address, 1))
        assert again.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst[1:] == 0xCA).all()


def test_memory_in_which_a_landing_has_not_ended_leaves_when_it_has() -> None:
    with te.Engine(SAMEHOST) as target, frozen_write(target) as frozen:
        for _ in range(2):
            with pytest.raises(te.FenceTimeout, match="call deregister again"):
                target.deregister(frozen.region, SOON_S)
            with pytest.raises(te.RegistrationError, match="overlaps the registered region"):
                target.register(frozen.dst)
        frozen.serve()
        target.deregister(frozen.region, TIMEOUT_S)
        frozen.dst[:] = 0xCA
        assert frozen.transfer.wait(TIMEOUT_S) is te.Status.DONE  # It landed before.
        assert (frozen.dst == 0xCA).all()
        with pytest.raises(te.RegistrationError, match="is not registered"):
            target.deregister(frozen.region)
        target.register(frozen.dst)


def test_an_engine_is_not_closed_while_a_worker_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    target = te.Engine(SAMEHOST)
    with te.Engine(SAMEHOST) as source, frozen_memory(NBYTES) as memory:
        frozen = Frozen(target, source, memory)
        kept = np.zeros(10, np.uint8)
        is_kept = weakref.ref(kept)
        target.register(kept)
        with monkeypatch.context() as short:
            short.setattr("te.engine.CLOSE_TIMEOUT_S", SHORT_S)
            with pytest.raises(te.FenceTimeout, match=r"te-worker-.* may still write"):
                target.close()
        del frozen.target, target, kept
        gc.collect()
        assert is_kept() is not None, "freed under a worker that may write to it"
        frozen.serve()
        wait_until(lambda: gc.collect() >= 0 and is_kept() is None, "the worker has ended")
    target = te.Engine(SAMEHOST)
    with frozen_write(target) as frozen:
        with monkeypatch.context() as short:
            short.setattr("te.engine.CLOSE_TIMEOUT_S", SHORT_S)
            with pytest.raises(te.FenceTimeout, match="call close again"):
                target.close()
        frozen.serve()
        target.close()
