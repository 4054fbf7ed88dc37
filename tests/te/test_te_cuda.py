# SPDX-License-Identifier: Apache-2.0
"""Whose memory an address is, and in which of several ways a device takes it."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_cuda import fake_cuda

import te
from te.memory_kinds import HOST, Reach, kind_of
from te.topology import Topology
from te.verbs.fabric import Fabric, first_that_works

NBYTES = 10_000


def test_memory_of_a_gpu_is_told_from_the_hosts() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    address = memory.ctypes.data
    assert kind_of(address) is HOST
    with fake_cuda(address, NBYTES):
        kind = kind_of(address)
        assert (kind.name, kind.reach, kind.has_copier) == ("cuda:5", Reach.NIC, False)
        assert kind_of(address + NBYTES - 1).name == "cuda:5"
        assert kind_of(address + NBYTES) is HOST
        kind.check(address, NBYTES)
        with pytest.raises(
            te.RegistrationError, match="begins in CUDA memory, but is not all memory of cuda:5"
        ):
            kind.check(address, NBYTES + 1)
    assert kind_of(address) is HOST


def test_memory_of_a_gpu_is_where_the_driver_says() -> None:
    """The sixth GPU that this process may use is ``cuda:1`` of the machine by its PCI address."""
    memory = np.zeros(NBYTES, np.uint8)
    address = memory.ctypes.data
    fabric = Fabric((), Topology((), {}, gpus={"0000:3b:00.0": "cuda:1"}, far={}), (0,))
    elsewhere = Fabric((), Topology((), {}, gpus={"0000:1b:00.0": "cuda:1"}, far={}), (0,))
    with fake_cuda(address, NBYTES):
        cuda = kind_of(address)
        assert fabric.location(address, cuda) == "cuda:1"
        assert fabric.location(address, HOST) == "cpu:0"
        assert elsewhere.location(address, cuda) == "*"


def test_engines_that_may_use_other_transports_refuse_it() -> None:
    memory = np.zeros(NBYTES, np.uint8)
    says = r"10000 bytes at 0x\w+ are CUDA memory, .* Config\(transports=\('rdma',\)\)"
    with te.Engine() as engine, fake_cuda(memory.ctypes.data, NBYTES):
        with pytest.raises(te.RegistrationError, match=says):
            engine.register(memory.ctypes.data, NBYTES)
        assert engine.register(np.zeros(10, np.uint8)).kind == "host"


@given(st.lists(st.booleans(), min_size=1, max_size=4))
def test_the_first_way_that_works_is_taken(works: list[bool]) -> None:
    tried: list[int] = []

    def way(number: int) -> Any:
        def register(nic: Any, address: int, nbytes: int) -> Any:
            tried.append(number)
            assert (nic, address, nbytes) == ("nic", 7, 8)
            if not works[number]:
                raise OSError(errno.EOPNOTSUPP, f"way {number}: not here")
            return number

        return register

    ways = [way(number) for number in range(len(works))]
    if any(works):
        assert first_that_works(ways, "nic", 7, 8) == works.index(True)  # type: ignore[arg-type]
        assert tried == list(range(works.index(True) + 1))
    else:
        says = "; ".join(f"way {number}: not here" for number in range(len(works)))
        with pytest.raises(te.RegistrationError, match=f"^{says}$"):
            first_that_works(ways, "nic", 7, 8)  # type: ignore[arg-type]


def test_a_lack_of_locked_memory_says_what_to_do() -> None:
    def register(nic: Any, address: int, nbytes: int) -> Any:
        raise OSError(errno.ENOMEM, "ibv_reg_mr: Cannot allocate memory")

    with pytest.raises(te.RegistrationError, match=r"ibv_reg_mr: .*; raise the limit .*ulimit -l"):
        first_that_works([register], "nic", 7, 8)  # type: ignore[arg-type]
