# SPDX-License-Identifier: Apache-2.0
"""Fences and dead peers over real verbs: what a frozen source had under way can never land."""

from __future__ import annotations

import base64
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from te_far import FarEngine, wait_until
from testbed_nics import Nic, shaped

import te

pytestmark = pytest.mark.rdma

MIB = 1 << 20
NBYTES = 64 * MIB
PAGE = 64 << 10
#: Of what happens at all, on an emulated machine whose one processor may be elsewhere for a while.
WAIT_S = 60.0
NEVER_S = 600.0
#: Longer than that while.
STALL_S = 20.0
SLOW = ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms")


def config(*nics: Nic) -> dict[str, Any]:
    return {
        "transports": ("rdma",),
        "nics": tuple(nic.device for nic in nics),
        "connect_timeout_s": WAIT_S,
        "stall_timeout_s": NEVER_S,
    }


@pytest.fixture
def source(rdma_nics: tuple[Nic, ...]) -> Iterator[FarEngine]:
    """In a process of its own, on the first two devices."""
    engine = FarEngine(**config(*rdma_nics[:2]))
    yield engine
    engine.signal(signal.SIGCONT)
    engine.end()


@pytest.fixture
def target(rdma_nics: tuple[Nic, ...]) -> Iterator[te.Engine]:
    with te.Engine(te.Config(**config(*rdma_nics[2:4]))) as engine:
        yield engine


def pages(base: int) -> list[int]:
    return list(range(base, base + NBYTES, PAGE))


def begin(source: FarEngine, target: te.Engine, dst: np.ndarray, tag: int) -> tuple[str, int, int]:
    """A slow transfer of all of `dst` of which some has landed: peer, memory and transfer there."""
    src = source.register(nbytes=NBYTES, seed=5)
    peer = source.connect(card=base64.b64encode(target.card()).decode())
    target.expect(tag)
    transfer = source.write(
        peer=peer, src=pages(src), dst=pages(dst.ctypes.data), nbytes=PAGE, tag=tag
    )
    wait_until(lambda: (dst[:: PAGE // 2] != 0).sum() > 50, "some has landed")
    return peer, src, transfer


def test_a_fence_holds_against_a_frozen_source(
    rdma_nics: tuple[Nic, ...], source: FarEngine, target: te.Engine
) -> None:
    dst = np.zeros(NBYTES, np.uint8)
    target.register(dst)
    with shaped(rdma_nics[0].netdev, *SLOW), shaped(rdma_nics[1].netdev, *SLOW):
        peer, src, transfer = begin(source, target, dst, tag=7)
        source.signal(signal.SIGSTOP)
        assert target.fence(7, WAIT_S) == 0  # It would be late if it waited for the source.
        dst[:] = 0xCA
        time.sleep(1.0)
        source.signal(signal.SIGCONT)
        time.sleep(1.0)
    # At full speed again: whatever it still wanted to write would have been here by now.
    assert source.outcome(number=transfer)[0] == "failed"
    target.expect(8)
    more = source.write(peer=peer, src=[src], dst=[dst.ctypes.data], nbytes=PAGE, tag=8)
    assert source.outcome(number=more)[0] == "done"
    assert target.arrived(8) == 1
    assert (dst[PAGE:] == 0xCA).all()


def test_a_fence_of_one_tag_leaves_the_others_whole(
    rdma_nics: tuple[Nic, ...], source: FarEngine, target: te.Engine
) -> None:
    dst, other = np.zeros(NBYTES, np.uint8), np.zeros(MIB, np.uint8)
    target.register(dst)
    target.register(other)
    with shaped(rdma_nics[0].netdev, *SLOW), shaped(rdma_nics[1].netdev, *SLOW):
        peer, src, transfer = begin(source, target, dst, tag=7)
        target.expect(8)
        small = source.write(peer=peer, src=[src], dst=[other.ctypes.data], nbytes=MIB, tag=8)
        target.fence(7, WAIT_S)
        dst[:] = 0xCA
        assert source.outcome(number=transfer)[0] == "failed"
        assert source.outcome(number=small)[0] == "done"
    assert target.arrived(8) == 1
    assert (dst == 0xCA).all()


def test_a_killed_or_frozen_destination_fails_its_transfers_alone(
    rdma_nics: tuple[Nic, ...],
) -> None:
    far = [FarEngine(**config(nic)) for nic in rdma_nics[1:4]]
    try:
        nbytes = 8 * MIB
        limit = {"stall_timeout_s": STALL_S}
        with te.Engine(te.Config(**config(rdma_nics[0]) | limit)) as source:
            src = np.arange(nbytes, dtype=np.uint64).view(np.uint8)[:nbytes].copy()
            source.register(src)
            peers, blocks = [], []
            for one in far:
                dst = one.register(nbytes=nbytes)
                peers.append(source.connect(one.bytes_card()))
                at = np.arange(0, nbytes, PAGE, dtype=np.uint64)
                blocks.append(
                    te.Blocks.of(at + np.uint64(src.ctypes.data), at + np.uint64(dst), PAGE)
                )
            for peer, one in zip(peers, blocks, strict=True):
                assert peer.write(one).wait(WAIT_S) is te.Status.DONE
            far[0].signal(signal.SIGKILL)
            far[1].signal(signal.SIGSTOP)
            transfers = [peer.write(one) for peer, one in zip(peers, blocks, strict=True)]
            assert transfers[2].wait(WAIT_S) is te.Status.DONE
            for transfer in transfers[:2]:
                with pytest.raises(te.TransferFailed):
                    transfer.wait(WAIT_S)
            assert peers[2].write(blocks[2]).wait(WAIT_S) is te.Status.DONE
    finally:
        for one in far:
            one.end()
