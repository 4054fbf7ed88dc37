# SPDX-License-Identifier: Apache-2.0
"""GPUs that do not show what NICs have written before it is flushed: over RDMA devices that move
nothing, with a driver without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from te_cuda import StandIn, cuda, fake_cuda, stand_in
from te_direct import DeviceEngine, Refusing

import te
from te.memory_kinds.cuda import kind
from te_bench._null import Wires

TIMEOUT_S = 60.0
NBYTES = 1 << 20
TAG = 0xF1
SAYS = r"are CUDA memory, which .* can move"
FLUSH = "cuFlushGPUDirectRDMAWrites"


@dataclass
class World:
    """Two engines with GPU memory."""

    driver: StandIn
    target: te.Engine
    peer: te.Peer
    src: int
    dst: int

    def write(self) -> te.Transfer:
        return self.peer.write(te.Blocks.of(self.src, self.dst, NBYTES), tag=TAG)

    def read(self) -> te.Transfer:
        return self.peer.read(te.Blocks.of(self.dst, self.src, NBYTES))


def rdma(wires: Wires) -> te.Engine:
    """With a device that takes such memory by ibv_reg_mr."""
    return DeviceEngine(Refusing(wires), ("rdma",))


@contextlib.contextmanager
def world(order: int) -> Iterator[World]:
    memory = [np.zeros(NBYTES, np.uint8) for _ in range(2)]
    src, dst = (one.ctypes.data for one in memory)
    wires = Wires()
    with (
        cuda() as driver,
        driver.claimed(src, NBYTES, 0),
        driver.claimed(dst, NBYTES, 0),
    ):
        driver.order_writes(order)
        with rdma(wires) as source, rdma(wires) as target:
            source.register(src, NBYTES, remote="none")
            target.register(dst, NBYTES, remote="read-write")
            target.expect(TAG)
            peer = source.connect(target.card())
            driver.forget_calls()
            yield World(driver, target, peer, src, dst)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "flushes"), [(0, 1), (100, 0), (200, 0)])
def test_what_has_landed_is_flushed_where_the_gpu_asks_for_it(order: int, flushes: int) -> None:
    with world(order) as here:
        for count in (1, 2, 3):
            assert here.write().wait(TIMEOUT_S) is te.Status.DONE
            assert here.target.arrived(TAG) == count
            assert here.driver.calls(name=FLUSH) == count * flushes
        assert here.read().wait(TIMEOUT_S) is te.Status.DONE
        assert here.driver.calls(name=FLUSH) == 4 * flushes


def test_what_cannot_be_flushed_has_not_arrived() -> None:
    with world(0) as here:
        here.driver.fail(FLUSH, 801)
        with pytest.raises(te.TransferFailed, match="what was written does not show: "):
            here.write().wait(TIMEOUT_S)
        assert here.target.arrived(TAG) == 0
        assert here.write().wait(TIMEOUT_S) is te.Status.DONE
        here.driver.fail(FLUSH, 801)
        with pytest.raises(te.TransferFailed, match="what was read does not show"):
            here.read().wait(TIMEOUT_S)
        assert here.read().wait(TIMEOUT_S) is te.Status.DONE


def test_memory_that_nobody_here_can_have_flushed_does_not_go_over_rdma() -> None:
    """It is of a context of somebody's own."""
    memory = np.zeros(NBYTES, np.uint8)
    with fake_cuda(memory.ctypes.data, NBYTES), rdma(Wires()) as engine:
        stand_in().order_writes(0)
        kind._kinds.clear()
        with pytest.raises(te.RegistrationError, match=SAYS):
            engine.register(memory.ctypes.data, NBYTES)


def test_memory_of_a_gpu_that_cannot_flush_does_not_go_over_rdma() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    with cuda() as driver:
        driver.order_writes(0, can_flush=False)
        with (
            driver.claimed(memory.ctypes.data, NBYTES, 0),
            rdma(Wires()) as engine,
            pytest.raises(te.RegistrationError, match=SAYS),
        ):
            engine.register(memory.ctypes.data, NBYTES)


def test_an_engine_with_devices_alone_has_one_kind_for_all_regions_of_a_gpu() -> None:
    memory = np.zeros(40 * NBYTES, np.uint8)
    with cuda() as driver, driver.claimed(memory.ctypes.data, memory.nbytes, 0):
        driver.forget_calls()
        with rdma(Wires()) as engine:
            for at in range(0, memory.nbytes, 2 * NBYTES):
                engine.register(memory.ctypes.data + at, NBYTES)
            assert driver.calls(name="cuStreamCreate") == 3, "those of other tests end when they do"
