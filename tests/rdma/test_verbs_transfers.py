# SPDX-License-Identifier: Apache-2.0
"""Transfers over real verbs: every byte lands where it should, over the rails that it should."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rdma_pair import TIMEOUT_S, descriptors, rdma_pair
from testbed_nics import Nic, wait_for

import te
from te_bench.pattern import check, fill
from te_bench.shapes import SHAPES, plan

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("patient_rails")]

MIB = 1 << 20
ROUNDS = 8
FOUR = pytest.param(4, marks=pytest.mark.devices(8))
SCALES = {"kv": 1 / 16, "s256": 1 / 8, "s2k": 1 / 8, "big": 1 / 8, "lat": 1 / 40, "thr8": 1 / 16}


@pytest.mark.parametrize("rails", [1, 2, FOUR])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_lands_exactly(rdma_nics: tuple[Nic, ...], name: str, rails: int) -> None:
    shape = SHAPES[name].scaled(SCALES[name])
    laid_out = plan(shape, seed=rails)
    with rdma_pair(rdma_nics, rails, laid_out.memory_nbytes) as pair:
        fill(pair.src, 7)
        pair.dst[:] = 0  # as `check` wants it where nothing belongs
        pair.target.expect(3)
        sent_before = [nic.wire_bytes("tx") for nic in pair.near]
        sources = laid_out.addresses(0, laid_out.source)
        destinations = laid_out.addresses(0, laid_out.destination)
        transfers = []
        for chosen in laid_out.pieces():
            step = 1 if shape.sync else len(chosen)
            for i in range(0, len(chosen), step):
                part = chosen[i : i + step]
                blocks = pair.blocks(sources[part], destinations[part], shape.nbytes)
                transfers.append(pair.peer.write(blocks, tag=3))
                if shape.sync:
                    assert transfers[-1].wait(TIMEOUT_S) is te.Status.DONE
        for transfer in transfers:
            assert transfer.wait(TIMEOUT_S) is te.Status.DONE
        assert pair.target.arrived(3) == len(transfers)
        landing = check(laid_out, pair.dst, 7)
        assert landing.verified, landing
        sent = [
            nic.wire_bytes("tx") - before
            for nic, before in zip(pair.near, sent_before, strict=True)
        ]
        assert sum(sent) >= shape.total_nbytes
        assert pair.peer.transport == "rdma"


@pytest.mark.parametrize("rails", [2, FOUR])
def test_every_rail_carries_its_part(rdma_nics: tuple[Nic, ...], rails: int) -> None:
    """Rails that are done sooner carry more: soft devices share one processor, which serves them by
    chance. In one of a few rounds: from one that stands still the others take its work."""
    nbytes, page = 32 * MIB, 64 << 10
    with rdma_pair(rdma_nics, rails, nbytes) as pair:
        at = np.arange(0, nbytes, page)
        fair = 3 * nbytes / rails
        rounds: list[list[int]] = []
        while not rounds or (len(rounds) < ROUNDS and not is_fair(rounds[-1], fair)):
            before = [nic.wire_bytes("tx") for nic in pair.near]
            for _ in range(3):
                assert pair.peer.write(pair.blocks(at, at[::-1], page)).wait(TIMEOUT_S)
            sent = [nic.wire_bytes("tx") - old for nic, old in zip(pair.near, before, strict=True)]
            rounds.append(sent)
        assert is_fair(rounds[-1], fair), rounds
        assert (pair.dst.reshape(-1, page)[::-1] == pair.src.reshape(-1, page)).all()
        wait_for(lambda: pair.peer.rails == rails, TIMEOUT_S, "all are up")


def is_fair(sent: list[int], fair: float) -> bool:
    return all(0.4 * fair <= one <= 1.8 * fair for one in sent)


def test_unequal_numbers_of_devices(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, 1, MIB, far_rails=3) as pair:
        assert pair.peer.rails == 3
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
        assert (pair.dst == pair.src).all()


def test_reads_come_back_over_the_rails(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, 2, MIB) as pair:
        blocks = te.Blocks.of(
            np.arange(0, MIB, 4096, dtype=np.uint64) + np.uint64(pair.dst.ctypes.data),
            np.arange(0, MIB, 4096, dtype=np.uint64) + np.uint64(pair.src.ctypes.data),
            4096,
        )
        assert pair.peer.read(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (pair.src == 0xEE).all()


def test_memory_that_is_registered_later_and_deregistered(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, 2, MIB) as pair:
        more = np.zeros(MIB, np.uint8)
        region = pair.target.register(more, remote="read-write")
        blocks = te.Blocks.of(pair.src.ctypes.data, more.ctypes.data, MIB)
        assert pair.peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (more == pair.src).all()
        pair.target.deregister(region)
        with pytest.raises(te.TransferFailed, match="outside the registered memory"):
            pair.peer.write(blocks).wait(TIMEOUT_S)
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE


@pytest.mark.parametrize("is_read", [False, True])
def test_nothing_of_a_refused_transfer_lands(rdma_nics: tuple[Nic, ...], is_read: bool) -> None:
    """Also not of the pieces that lie before the block without a place, on whichever rail."""
    page, count = 4096, 4096
    with rdma_pair(rdma_nics, 2, page * count) as pair:
        here, there = pair.src.ctypes.data, pair.dst.ctypes.data
        near, far = here + np.arange(count) * page, there + np.arange(count) * page
        far[-1] = there + page * count - 100
        before = pair.src.copy()
        if is_read:
            transfer, where = pair.peer.read(te.Blocks.of(far, near, page)), "source"
        else:
            transfer, where = pair.peer.write(te.Blocks.of(near, far, page)), "destination"
        says = rf"the {where}: {page} bytes at {far[-1]:#x} lie outside .* the nearest of 1 regions"
        with pytest.raises(te.TransferFailed, match=says):
            transfer.wait(TIMEOUT_S)
        assert (pair.src == before).all()
        assert (pair.dst == 0xEE).all()
        assert pair.peer.write(pair.blocks([0], [0], page)).wait(TIMEOUT_S) is te.Status.DONE


def test_a_tag_that_is_not_open_is_refused(rdma_nics: tuple[Nic, ...]) -> None:
    with rdma_pair(rdma_nics, 1, MIB) as pair:
        with pytest.raises(te.TransferFailed, match="not open here"):
            pair.peer.write(pair.blocks([0], [0], MIB), tag=9).wait(TIMEOUT_S)
        assert (pair.dst == 0xEE).all()


def test_asking_for_rdma_where_no_device_matches(rdma_nics: tuple[Nic, ...]) -> None:
    with pytest.raises(ValueError, match="no RDMA device matches 'mlx9'"):
        te.Engine(te.Config(transports=("rdma",), nics=("mlx9",)))


def device_descriptors() -> Counter[str]:
    """What this process has open of RDMA devices: of each a file, one for its events, and one for
    each completion channel; of librdmacm a file for each of its channels."""
    return Counter(where for _, where in descriptors() if "infiniband" in where)


@pytest.mark.parametrize("again", range(2))
def test_a_closed_engine_has_no_device_open(rdma_nics: tuple[Nic, ...], again: int) -> None:
    """Whatever of it is still there. Of iWARP librdmacm keeps each device open that it has used,
    once, for as long as the process lives: hence the second time."""
    before = device_descriptors()
    with rdma_pair(rdma_nics, 1, MIB) as pair:
        pair.target.expect(3)
        blocks = pair.blocks(0, 0, MIB)
        assert pair.peer.write(blocks, tag=3).wait(TIMEOUT_S) is te.Status.DONE
        assert device_descriptors() - before
    if again or rdma_nics[0].driver != "siw":
        assert not device_descriptors() - before
    with pytest.raises(OSError, match="was closed"):
        pair.source._transports.fabric.nics[0].device.port(1)  # type: ignore[union-attr]
