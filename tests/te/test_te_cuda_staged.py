# SPDX-License-Identifier: Apache-2.0
"""Engines with memory of GPUs, over every transport that stages it: on a driver without a GPU
(te_cuda.py), with all that may go wrong there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from te_cuda import SYNCHRONISES, CudaMemory, StandIn, cuda, stand_in
from te_sealed import capsule
from te_staging import KindStruct, Ops, struct_of

import te
from te.memory_kinds import RECOGNISERS, MemoryKind, kind_of

TIMEOUT_S = 60.0
TAG = 0xC0DA
PAGE = 4096
NBYTES = 256 * PAGE
SLOT_BYTES = 16 << 10
BATCH, BATCH_12, PLAIN = "cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "cuMemcpyAsync"
TRANSPORTS = pytest.mark.parametrize("transport", ["tcp", "samehost"])
#: Of the source and of the destination.
PLACES = pytest.mark.parametrize("places", ["cuda-cuda", "cuda-host", "host-cuda"])
ONE_SIDE = pytest.mark.parametrize("places", ["cuda-host", "host-cuda"])


def config(transport: str, slots: int = 4) -> te.Config:
    """With so many slots for each worker and direction."""
    return te.Config(
        transports=(transport,),
        rails=2,
        workers=2,
        segment_bytes=100_000,
        connect_timeout_s=TIMEOUT_S,
        stall_timeout_s=TIMEOUT_S,
        staging_bytes=4 * slots * SLOT_BYTES,
        staging_slot_bytes=SLOT_BYTES,
    )


@dataclass
class World:
    """Two engines, and memory of each."""

    driver: StandIn
    source: te.Engine
    target: te.Engine
    src: CudaMemory
    dst: CudaMemory
    peer: te.Peer

    def write(self, seed: int = 1, size: int = PAGE) -> te.Transfer:
        """Pages, or pieces of them, in any order on both sides."""
        generator = random.Random(seed)
        pages = range(NBYTES // PAGE)
        near = np.array(generator.sample(pages, len(pages)), np.uint64) * np.uint64(PAGE)
        far = np.array(generator.sample(pages, len(pages)), np.uint64) * np.uint64(PAGE)
        self.places = [*zip(near.tolist(), far.tolist(), strict=True)]
        self.size = size
        blocks = te.Blocks.of(
            np.uint64(self.src.address) + near, np.uint64(self.dst.address) + far, size
        )
        return self.peer.write(blocks, tag=TAG)

    @property
    def has_arrived(self) -> bool:
        """Whether the destination has what the last ``write`` names."""
        return all(
            (self.dst.view[far : far + self.size] == self.src.view[near : near + self.size]).all()
            for near, far in self.places
        )


def memory_of(driver: StandIn, place: str, ordinal: int = 0) -> CudaMemory:
    if place == "cuda":
        return driver.allocate(NBYTES, ordinal)
    array = np.zeros(NBYTES, np.uint8)
    return CudaMemory(array.ctypes.data, array)


@contextlib.contextmanager
def world(transport: str, places: str = "cuda-cuda", **changes: Any) -> Iterator[World]:
    near, far = places.split("-")
    with cuda(**changes) as driver:
        src, dst = memory_of(driver, near), memory_of(driver, far)
        src.view[:] = np.frombuffer(random.Random(7).randbytes(NBYTES), np.uint8)
        with te.Engine(config(transport)) as source, te.Engine(config(transport)) as target:
            source.register(src.address, NBYTES, remote="read")
            target.register(dst.address, NBYTES)
            target.expect(TAG)
            here = World(driver, source, target, src, dst, source.connect(target.card()))
            driver.forget_calls()
            yield here
        driver.reset()
        for place, memory in ((near, src), (far, dst)):
            if place == "cuda":
                driver.free(memory)


def outcome(transfer: te.Transfer) -> te.Status:
    with contextlib.suppress(te.TransferFailed):
        transfer.wait(TIMEOUT_S)
    return transfer.poll()


@pytest.mark.slow
@TRANSPORTS
@PLACES
@pytest.mark.parametrize(("version", "call"), [(13000, BATCH), (12080, BATCH_12), (12000, PLAIN)])
def test_bytes_arrive(transport: str, places: str, version: int, call: str) -> None:
    with world(transport, places, version=version, seed=version, delay_us=version // 100) as here:
        for seed, size in enumerate((PAGE, 300, PAGE)):
            assert here.write(seed, size).wait(TIMEOUT_S) is te.Status.DONE
            assert here.has_arrived
            assert here.target.arrived(TAG) == seed + 1
        assert here.driver.calls(name=call) > 0
        assert sum(here.driver.calls(name=one) for one in (BATCH, BATCH_12, PLAIN)) == (
            here.driver.calls(name=call)
        )


@pytest.mark.slow
@TRANSPORTS
@PLACES
def test_the_callers_thread_asks_the_driver_for_nothing(transport: str, places: str) -> None:
    """SGLang's scheduler would wait there for what others do; and nobody waits for the device."""
    with world(transport, places) as here:
        transfer = here.write()
        while transfer.poll() is te.Status.PENDING:
            here.target.arrived(TAG)
        assert here.write(2).wait(TIMEOUT_S) is te.Status.DONE
        assert here.driver.calls(threading.get_native_id()) == 0
        assert here.driver.calls(flags=SYNCHRONISES) == 0
        assert here.driver.calls(name="cuEventQuery") > 0


@pytest.mark.slow
@TRANSPORTS
@ONE_SIDE
@pytest.mark.parametrize(
    ("call", "error"),
    [(BATCH, 2), ("cuEventRecord", 2), ("cuEventCreate", 2), ("cuCtxPushCurrent", 201)],
)
def test_a_call_that_fails_fails_its_transfer_alone(
    transport: str, places: str, call: str, error: int
) -> None:
    says = "source memory cannot be read" if places == "cuda-host" else "cannot be written"
    with world(transport, places) as here:
        here.driver.fail(call, error, after=0 if call == "cuEventCreate" else 3)
        transfer = here.write()
        # Without an event of its own a copy ends with its stream.
        expected = te.Status.DONE if call == "cuEventRecord" else te.Status.FAILED
        assert outcome(transfer) is expected
        if expected is te.Status.FAILED:
            assert says in str(transfer.reason)
            assert here.target.arrived(TAG) == 0
        assert here.write().wait(TIMEOUT_S) is te.Status.DONE
        assert here.has_arrived


@pytest.mark.slow
@TRANSPORTS
@ONE_SIDE
def test_a_broken_context_fails_transfers_and_holds_up_nothing(transport: str, places: str) -> None:
    with world(transport, places) as here:
        here.driver.fail_copy(after=3)
        transfer = here.write()
        assert outcome(transfer) is te.Status.FAILED
        if places == "cuda-host":
            says = "cannot be read: Input/output error (cuda:0: cu"
            assert says in str(transfer.reason)
            assert "CUDA_ERROR_ILLEGAL_ADDRESS)" in str(transfer.reason)
        assert outcome(here.write()) is te.Status.FAILED
        here.target.fence(TAG, TIMEOUT_S)
        here.target.close()
        here.source.close()
        here.driver.forget_pinned()


@pytest.mark.slow
@TRANSPORTS
def test_a_fence_is_late_when_the_device_hangs(transport: str) -> None:
    with world(transport, "host-cuda") as here:
        with here.driver.stuck():
            transfer = here.write()
            while here.driver.calls(name="cuEventRecord") == 0:
                transfer.poll()
            with pytest.raises(te.FenceTimeout, match="a landing did not end"):
                here.target.fence(TAG, 0.05)
        assert here.target.fence(TAG, TIMEOUT_S) == 0
        before = here.dst.view.copy()
        assert outcome(transfer) is te.Status.FAILED
        assert "was fenced" in transfer.reason
        assert (here.dst.view == before).all()


@pytest.mark.slow
@TRANSPORTS
@ONE_SIDE
def test_an_engine_says_that_the_device_still_copies(
    transport: str, places: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te.engine.CLOSE_TIMEOUT_S", 0.2)
    with world(transport, places) as here:
        engine = here.source if places == "cuda-host" else here.target
        with here.driver.stuck():
            transfer = here.write()
            while here.driver.calls(name="cuEventRecord") == 0:
                transfer.poll()
            with pytest.raises(te.FenceTimeout, match="memory must not be reused"):
                engine.close()
        monkeypatch.setattr("te.engine.CLOSE_TIMEOUT_S", TIMEOUT_S)
        engine.close()
        assert outcome(transfer) in (te.Status.FAILED, te.Status.DONE)


@pytest.mark.slow
@TRANSPORTS
def test_a_capture_goes_on(transport: str) -> None:
    """Of a graph, by another thread, in the mode that PyTorch takes; a fence asks events, too."""
    with world(transport) as here, here.driver.captured():
        assert here.write().wait(TIMEOUT_S) is te.Status.DONE
        here.target.fence(TAG, TIMEOUT_S)


@pytest.mark.slow
@TRANSPORTS
def test_memory_of_two_gpus_and_of_the_host_in_one_transfer(transport: str) -> None:
    with world(transport) as here, here.driver.current(1):
        others = [memory_of(here.driver, "cuda", 1), memory_of(here.driver, "host")]
        for one in others:
            here.source.register(one.address, NBYTES)
            one.view[:] = np.frombuffer(random.Random(one.address).randbytes(NBYTES), np.uint8)
        srcs = [here.src, *others]
        starts = np.arange(0, NBYTES, PAGE, np.uint64)
        which = np.arange(len(starts)) % 3
        near = np.array([one.address for one in srcs], np.uint64)[which] + starts
        blocks = te.Blocks.of(near, np.uint64(here.dst.address) + starts, PAGE)
        assert here.peer.write(blocks, tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
        for i, at in enumerate(starts.tolist()):
            there = here.dst.view[at : at + PAGE]
            assert (there == srcs[which[i]].view[at : at + PAGE]).all()
        here.source.close()
        here.driver.free(others[0], 1)


@pytest.mark.slow
def test_all_that_was_taken_of_the_driver_is_given_back() -> None:
    gc.collect()
    driver = stand_in()
    with world("tcp") as here:
        before = [driver.count("streams") - 3, driver.retained(0) - 1]
        assert here.write().wait(TIMEOUT_S) is te.Status.DONE
        vars(here).clear()
    del here
    gc.collect()
    until = time.monotonic() + TIMEOUT_S
    while driver.count("streams") > before[0] and time.monotonic() < until:
        time.sleep(0.001)  # They end by themselves, once they are destroyed.
    assert driver.count("events") == 0
    assert driver.retained(0) == before[1] - 1
    # Of those before, some of earlier tests may have ended since.
    assert driver.count("streams") <= before[0]


class Hasty(MemoryKind):
    """CUDA memory whose copies count as over when they have begun."""

    name = "hasty"
    description = "CUDA memory"
    has_copier = True

    def __init__(self, real: MemoryKind, memory: CudaMemory) -> None:
        self._real, self._memory = real, memory
        self.reach = real.reach  # type: ignore[misc]
        struct = KindStruct.from_address(struct_of(real.compiled))
        self._state, self._ops = struct.state, struct.ops.contents
        self._events: list[int] = []
        fields = dict(Ops._fields_)
        query = fields["query"](lambda state, event: 0)
        release = fields["release"](lambda state, event: self._events.append(event))
        self._hasty = Ops(self._ops.copy, query, release)
        self._struct = KindStruct(ctypes.pointer(self._hasty), self._state, struct.touched_by)
        self.compiled = capsule(ctypes.addressof(self._struct))

    def recognise(self, address: int) -> MemoryKind | None:
        return self if 0 <= address - self._memory.address < NBYTES else None

    def check(self, address: int, nbytes: int) -> None:
        self._real.check(address, nbytes)

    def location(self, address: int, gpus: Any) -> str:
        return "*"

    def pin(self, address: int, nbytes: int) -> Any:
        return self._real.pin(address, nbytes)

    def settle(self) -> None:
        """Ends the copies after all."""
        for event in self._events:
            while self._ops.query(self._state, event) == errno.EAGAIN:
                pass
            self._ops.release(self._state, event)


@pytest.mark.slow
@TRANSPORTS
@ONE_SIDE
def test_without_the_wait_wrong_bytes_are_found(transport: str, places: str) -> None:
    """The control: what the tests above would see if te did not wait for the copies of one side."""
    with cuda() as driver:
        near, far = places.split("-")
        src, dst = memory_of(driver, near), memory_of(driver, far)
        src.view[:] = 1
        memory = src if near == "cuda" else dst
        hasty = Hasty(kind_of(memory.address), memory)
        RECOGNISERS.insert(0, hasty.recognise)
        with te.Engine(config(transport)) as source, te.Engine(config(transport)) as target:
            source.register(src.address, NBYTES)
            target.register(dst.address, NBYTES)
            target.expect(TAG)
            peer = source.connect(target.card())
            with driver.stuck():
                blocks = te.Blocks.of(src.address, dst.address, NBYTES)
                assert peer.write(blocks, tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
                assert not (dst.view == 1).all()
            hasty.settle()
        RECOGNISERS.remove(hasty.recognise)
        driver.free(memory)
