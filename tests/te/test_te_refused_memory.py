# SPDX-License-Identifier: Apache-2.0
"""Memory that one of an engine's transports cannot move, and another can."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import pytest
from te_cuda import CudaMemory, StandIn, cuda, fake_cuda
from te_direct import DeviceEngine, Refusing

import te
from te_bench._null import Wires

NBYTES = 3 * 4096
TAG, TIMEOUT_S = 0xC0DA, 30.0
WHY = "ibv_reg_dmabuf_mr: Operation not supported; ibv_reg_mr: Bad address"


@contextlib.contextmanager
def gpu() -> Iterator[tuple[StandIn, CudaMemory, Refusing]]:
    """A driver, some memory of a GPU, and a device that does not take it."""
    with cuda() as driver:
        memory = driver.allocate(NBYTES)
        device = Refusing(Wires())
        device.refused = range(memory.address, memory.address + NBYTES)
        yield driver, memory, device
        driver.free(memory)


def test_memory_that_devices_refuse_goes_another_way(caplog: pytest.LogCaptureFixture) -> None:
    with gpu() as (driver, memory, device), te.Engine() as target:
        there = driver.allocate(NBYTES)
        memory.view[:] = np.arange(NBYTES) % 251
        target.register(there.address, NBYTES)
        target.expect(TAG)
        with DeviceEngine(device) as source:
            host = source.register(np.zeros(NBYTES, np.uint8))
            assert host.registration is not None
            with caplog.at_level(logging.WARNING, "te"):
                region = source.register(memory.address, NBYTES)
            (line,) = caplog.messages
            assert line.endswith(f"rdma: it cannot move CUDA memory: {WHY}")
            assert region.registration is None
            assert source.stats().transports == ("samehost", "tcp")
            assert set(te.handshake.decode_card(source.card()).offers) == {"samehost", "tcp"}
            # What comes later asks the devices no more.
            assert source.register(np.zeros(NBYTES, np.uint8)).registration is None
            peer = source.connect(target.card())
            blocks = te.Blocks.of(memory.address, there.address, NBYTES)
            assert peer.write(blocks, tag=TAG).wait(TIMEOUT_S) is te.Status.DONE
            assert (there.view == memory.view).all()
            source.deregister(host)
        target.close()
        driver.free(there)


def test_the_reason_is_a_peers_too() -> None:
    with gpu() as (_, memory, device), DeviceEngine(device) as source:
        source.register(memory.address, NBYTES)
        with DeviceEngine(Refusing(Wires())) as target:
            reason = source.connect(target.card()).transport_reason
        assert reason == f"rdma: it cannot move CUDA memory: {WHY}"


@pytest.mark.parametrize("known_by", ["card", "connect"])
def test_a_peer_that_may_count_on_rdma_keeps_it(known_by: str) -> None:
    says = f"12288 bytes at 0x.* are CUDA memory, which the devices do not take: {WHY}"
    with gpu() as (_, memory, device), DeviceEngine(device) as engine, te.Engine() as other:
        engine.card() if known_by == "card" else engine.connect(other.card())
        with pytest.raises(te.RegistrationError, match=says):
            engine.register(memory.address, NBYTES)
        assert engine.stats().transports == DeviceEngine.ALL
        assert engine.register(np.zeros(9, np.uint8)).registration is not None


def test_without_another_transport_it_is_refused() -> None:
    with gpu() as (_, memory, device), DeviceEngine(device, ("rdma",)) as engine:
        with pytest.raises(te.RegistrationError, match=f"devices do not take: {WHY}$"):
            engine.register(memory.address, NBYTES)
        assert engine.stats().transports == ("rdma",)


def test_memory_without_a_copier_goes_over_rdma_alone() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    with fake_cuda(memory.ctypes.data, NBYTES), DeviceEngine(Refusing(Wires())) as engine:
        assert engine.register(memory.ctypes.data, NBYTES).registration is not None
        assert engine.stats().transports == ("rdma",)


def test_what_neither_devices_nor_others_take_changes_nothing() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    device = Refusing(Wires())
    device.refused = range(memory.ctypes.data, memory.ctypes.data + NBYTES)
    with fake_cuda(memory.ctypes.data, NBYTES), DeviceEngine(device) as engine:
        with pytest.raises(te.RegistrationError, match="devices do not take"):
            engine.register(memory.ctypes.data, NBYTES)
        assert engine.stats().transports == DeviceEngine.ALL


def test_host_memory_that_devices_refuse_is_an_error() -> None:
    """It lacks a limit, which can be raised, and not a driver."""
    memory, device = np.zeros(NBYTES, np.uint8), Refusing(Wires())
    device.refused = range(memory.ctypes.data, memory.ctypes.data + NBYTES)
    with DeviceEngine(device) as engine:
        with pytest.raises(te.RegistrationError, match=r"^ibv_reg_mr: Bad address$"):
            engine.register(memory)
        assert engine.stats().transports == DeviceEngine.ALL
