# SPDX-License-Identifier: Apache-2.0
"""CUDA memory on real devices. The soft ones take no dma-buf, so that the peer-memory way is gone
for real; the memory is the host's, and only said to be a GPU's."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from rdma_pair import TIMEOUT_S, RdmaPair, descriptors, rdma_pair
from te_cuda import fake_cuda
from testbed_nics import Nic

import te

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("patient_rails")]

PAGE = mmap.PAGESIZE
NBYTES = 5 * PAGE + 700


def write_and_check(pair: RdmaPair, there: np.ndarray) -> None:
    blocks = te.Blocks.of(pair.src.ctypes.data, there.ctypes.data, len(there))
    assert pair.peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
    assert (there == pair.src[: len(there)]).all()


@pytest.mark.parametrize("refusal", [0, 801])
def test_without_dma_buf_it_goes_the_peer_memory_way(
    rdma_nics: tuple[Nic, ...], refusal: int
) -> None:
    with rdma_pair(rdma_nics, 2, 8 * PAGE) as pair:
        whole = np.zeros(NBYTES + 300, np.uint8)
        there = whole[300:]
        address = there.ctypes.data
        open_before = descriptors()
        with fake_cuda(address, NBYTES, refusal) as cuda:
            region = pair.target.register(address, NBYTES, remote="read-write")
            if not refusal:
                start, nbytes = cuda.exported()
                assert start <= address < start + PAGE
                assert start + nbytes - PAGE < address + NBYTES <= start + nbytes
        # A greeting of the rails may have been open until now.
        assert not descriptors() - open_before
        assert region.kind == "cuda:5"
        write_and_check(pair, there)
        pair.target.deregister(region)


@pytest.mark.parametrize(
    ("refusal", "first"),
    [
        (0, r"ibv_reg_dmabuf_mr of \d+ bytes at 0x\w+ on \w+: Operation not supported"),
        (801, r"cuMemGetHandleForAddressRange of \d+ bytes at 0x\w+: CUDA_ERROR_NOT_SUPPORTED"),
    ],
    ids=["the device", "CUDA"],
)
def test_what_failed_both_ways_is_said(
    rdma_nics: tuple[Nic, ...], refusal: int, first: str
) -> None:
    with rdma_pair(rdma_nics, 2, 8 * PAGE) as pair:
        # As CUDA keeps its addresses: taken, and nobody's to touch.
        room = mmap.mmap(-1, NBYTES, prot=0)
        address = int(np.frombuffer(room, np.uint8).ctypes.data)
        second = r"ibv_reg_mr of \d+ bytes at 0x\w+ on \w+: Bad address"
        says = rf"CUDA memory, which the devices do not take: {first}; {second}$"
        with fake_cuda(address, NBYTES, refusal), pytest.raises(te.RegistrationError, match=says):
            pair.target.register(address, NBYTES, remote="read-write")
        there = np.zeros(NBYTES, np.uint8)
        pair.target.register(there, remote="read-write")
        write_and_check(pair, there)
