# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport: what must not land is refused with its sentence, and costs nobody
else anything. Bounds, tags, ranges, rights of regions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from te_contract import EMPTY, GUARD, TIMEOUT_S, Pair, Way, cancel, paired
from te_far import pattern

import te
from te.memory import RIGHTS, Remote

TAG = te.new_tag()
#: The smallest that goes without the rings on the same host, and one that goes through them.
SIZES = (64, 8192)
WORDS: list[Remote] = list(RIGHTS)

NOT_READ = r'may not read; register it there with remote="read" or "read-tagged"'
NOT_WRITTEN = r'may not write; register it there with remote="tagged" or "read-tagged"'
NOT_UNTAGGED = (
    r"may not write without a tag; write under one that is expected there, or register it there"
    r' with remote="read-write"'
)
OUTSIDE = "lie outside the registered memory; nothing is registered for peers"
#: By what the region is registered for and what a peer does: how the refusal ends, if it is one.
VERDICTS: dict[tuple[Remote, str], str | None] = {
    ("none", "write"): OUTSIDE,
    ("none", "tagged write"): OUTSIDE,
    ("none", "read"): OUTSIDE,
    ("read", "write"): NOT_UNTAGGED,
    ("read", "tagged write"): NOT_WRITTEN,
    ("read", "read"): None,
    ("tagged", "write"): NOT_UNTAGGED,
    ("tagged", "tagged write"): None,
    ("tagged", "read"): NOT_READ,
    ("read-tagged", "write"): NOT_UNTAGGED,
    ("read-tagged", "tagged write"): None,
    ("read-tagged", "read"): None,
    ("read-write", "write"): None,
    ("read-write", "tagged write"): None,
    ("read-write", "read"): None,
}
NBYTES = 1 << 14


def does(pair: Pair, what: str, nbytes: int, at: int = 0, tag: int = TAG) -> te.Status:
    """A transfer of the first bytes of the source."""
    if what == "read":
        transfer = pair.peer.read(pair.blocks_back(at, 0, nbytes))
    else:
        transfer = pair.write(0, at, nbytes, tag * (what != "write"))
    return transfer.wait(TIMEOUT_S)


# -- bounds


def test_refused_ranges_leave_memory_and_link_alone(pair: Pair) -> None:
    end = len(pair.dst)
    outside = te.Blocks.concat([pair.blocks(0, 0, 64), pair.blocks(0, end - 10, 11)])
    with pytest.raises(
        te.TransferFailed, match=r"refused: the destination: 11 bytes at 0x\w+ lie outside"
    ):
        pair.peer.write(outside).wait(TIMEOUT_S)
    assert (pair.dst == GUARD).all()
    with pytest.raises(te.BoundsError, match=r"lie outside .* the nearest of 1 regions"):
        pair.write(end - 10, 0, 11)
    assert pair.write(0, 0, 64).wait(TIMEOUT_S) is te.Status.DONE
    assert pair.peer.alive


def test_refusal_stops_a_long_transfer_early(pair: Pair) -> None:
    offsets = np.concatenate([[len(pair.dst) - 5], np.arange(1000) * 4000])
    transfer = pair.write(np.arange(1001) * 4000, offsets, 4000)
    with pytest.raises(te.TransferFailed, match="refused"):
        transfer.wait(TIMEOUT_S)
    # Other rails may have brought later segments before; of the refused one nothing lands.
    untouched = len(pair.dst) if pair.way.looks_up_all else 60 * 4000
    assert (pair.dst[:untouched] == GUARD).all()
    assert pair.write(0, 0, 1).wait(TIMEOUT_S) is te.Status.DONE


def test_reads_are_checked_on_both_sides(pair: Pair) -> None:
    end = len(pair.src)
    with pytest.raises(te.BoundsError, match="lie outside"):
        pair.peer.read(pair.blocks_back(0, end - 5, 6))
    near = np.arange(4000) * 1000
    far = near.copy()
    far[3210] = end - 5
    read = pair.peer.read(pair.blocks_back(far, near, 999))
    with pytest.raises(te.TransferFailed, match=r"refused: the source: 999 bytes at .* lie outs"):
        read.wait(TIMEOUT_S)
    cancel(read)  # Pieces that were allowed may still be landing.
    before = pair.src.copy()
    with pytest.raises(te.TransferFailed, match="refused: the source: 6 bytes"):
        pair.peer.read(pair.blocks_back(end - 5, 0, 6)).wait(TIMEOUT_S)
    assert (pair.src == before).all()
    assert pair.peer.read(pair.blocks_back(0, 0, 10)).wait(TIMEOUT_S) is te.Status.DONE
    assert pair.peer.read(EMPTY).wait(TIMEOUT_S) is te.Status.DONE


def test_deregistered_memory_is_out_of_reach(pair: Pair) -> None:
    pair.target.deregister(pair.dst_region, TIMEOUT_S)
    with pytest.raises(te.TransferFailed, match="nothing is registered"):
        pair.write(0, 0, 10).wait(TIMEOUT_S)
    with pytest.raises(te.TransferFailed, match="nothing is registered"):
        pair.peer.read(pair.blocks_back(0, 0, 10)).wait(TIMEOUT_S)
    with pytest.raises(te.RegistrationError, match="not registered"):
        pair.target.deregister(pair.dst_region)
    pair.register(pair.target, pair.dst, "read-write")
    assert pair.write(0, 0, 10).wait(TIMEOUT_S) is te.Status.DONE
    pair.source.deregister(pair.src_region, TIMEOUT_S)
    with pytest.raises(te.BoundsError, match="nothing is registered"):
        pair.write(0, 0, 10)
    with pytest.raises(te.BoundsError, match="nothing is registered"):
        pair.peer.read(pair.blocks_back(0, 0, 10))
    assert (pair.dst[10:] == GUARD).all()


# -- tags


def test_tags_that_are_not_open_are_refused(pair: Pair) -> None:
    for _ in range(2):
        for blocks in (pair.blocks(0, 0, 100), EMPTY):
            with pytest.raises(te.TransferFailed, match="tag 0x5 is not open here"):
                pair.peer.write(blocks, tag=5).wait(TIMEOUT_S)
        pair.target.expect(5)
        assert pair.target.fence(5, TIMEOUT_S) == 0
    assert (pair.dst == GUARD).all()
    pair.target.expect(5)
    pair.write(0, 0, 100, tag=5).wait(TIMEOUT_S)
    assert pair.target.fence(5, TIMEOUT_S) == 1
    assert pair.target.arrived(5) == 0
    with pytest.raises(ValueError, match="between 1 and"):
        pair.write(0, 0, 1, tag=-1)


def test_the_bytes_that_arrived_are_those_of_the_transfers_counted(pair: Pair) -> None:
    assert pair.target.arrived_nbytes(5) == 0
    pair.target.expect(5)
    pair.target.expect(6)
    sizes = (1, 100, 70_000, 3 << 20, 0)
    for nbytes in sizes:
        blocks = pair.blocks(0, 0, nbytes) if nbytes else EMPTY
        pair.peer.write(blocks, tag=5).wait(TIMEOUT_S)
    outside = te.Blocks.concat([pair.blocks(0, 0, 64), pair.blocks(0, len(pair.dst) - 10, 11)])
    with pytest.raises(te.TransferFailed, match="refused"):
        pair.peer.write(outside, tag=5).wait(TIMEOUT_S)
    assert (pair.target.arrived(5), pair.target.arrived_nbytes(5)) == (len(sizes), sum(sizes))
    assert (pair.target.arrived(6), pair.target.arrived_nbytes(6)) == (0, 0)
    pair.target.fence(5, TIMEOUT_S)
    assert pair.target.arrived_nbytes(5) == 0
    assert pair.target.arrived_nbytes(-1) == pair.target.arrived_nbytes(1 << 64) == 0


def test_a_tag_is_for_whom_it_was_opened(way: Way) -> None:
    with paired(way, NBYTES, remote="tagged") as pair:
        source, target = pair.source, pair.target
        life, before = te.Identity(source.id, source.epoch), te.Identity(source.id, 1)
        for peer in (source.id, source, life, None):
            target.expect(TAG, peer=peer)
            assert does(pair, "tagged write", 64) is te.Status.DONE
            assert target.fence(TAG, TIMEOUT_S) == 1
        pair.dst[:] = GUARD
        says = (
            f"the tag {TAG:#x} is not open here: never expected, fenced, or expected from another"
        )
        for other in (target.id, target, before):
            target.expect(TAG, peer=other)
            for nbytes in SIZES:
                with pytest.raises(te.TransferFailed, match=says):
                    does(pair, "tagged write", nbytes)
            with pytest.raises(te.TransferFailed, match=says):
                pair.peer.write(EMPTY, TAG).wait(TIMEOUT_S)
            assert target.fence(TAG, TIMEOUT_S) == 0
        with pytest.raises(te.TransferFailed, match=says):  # The same where nobody may write.
            does(pair, "tagged write", 64)
        assert (pair.dst == GUARD).all()
        assert pair.peer.alive


def test_of_two_peers_one_may_write_under_a_tag(way: Way) -> None:
    with paired(way, NBYTES, remote="tagged") as pair, pair.make() as other:
        memory = pattern(5, NBYTES)
        near = other.register(memory)
        peer = other.connect(pair.target.card())
        pair.target.expect(TAG, peer=other)
        with pytest.raises(te.TransferFailed, match="is not open here"):
            does(pair, "tagged write", 64)
        assert (pair.dst == GUARD).all()
        write = peer.write(te.Blocks.of(near.address, pair.dst_region.address, 64), TAG)
        assert write.wait(TIMEOUT_S) is te.Status.DONE
        pair.assert_moved(pair.dst[:64], np.full(64, GUARD, np.uint8), memory[:64])
        assert pair.target.arrived(TAG) == 1


def test_writes_outside_the_ranges_of_their_tag_are_refused(way: Way) -> None:
    with paired(way, NBYTES, remote="tagged") as pair:
        base = pair.dst_region.address
        # The first two are one; of the last a part is not registered.
        ranges = [(base + 1000, 1000), (base, 1000), (base + 9000, 1 << 20)]
        pair.target.expect(TAG, ranges=ranges)
        pair.src[:] = 1
        before = pair.dst.copy()
        for at, nbytes in ((0, 2000), (900, 200), (9000, 64), (9000, 7000)):
            assert does(pair, "tagged write", nbytes, at) is te.Status.DONE
        after = before.copy()
        after[[*range(2000), *range(9000, 16000)]] = 1
        pair.assert_moved(pair.dst, before, after)
        with pytest.raises(te.TransferFailed, match="outside the registered memory"):
            does(pair, "tagged write", 64, NBYTES - 32)
        if way.looks_up_all:  # A NIC knows no ranges.
            assert does(pair, "tagged write", 64, 5000) is te.Status.DONE
            return
        says = rf"the destination: .* outside the ranges that the tag {TAG:#x} was opened for"
        pair.dst[:] = GUARD
        for at, nbytes in ((0, 2001), (2000, 1), (8999, 64), (1900, 8192)):
            with pytest.raises(te.TransferFailed, match=f"{nbytes} bytes at {base + at:#x} lie "):
                does(pair, "tagged write", nbytes, at)
            with pytest.raises(te.TransferFailed, match=says):
                does(pair, "tagged write", nbytes, at)
        with pytest.raises(te.TransferFailed, match=says):
            pair.write(0, [0, 5000], 64, TAG).wait(TIMEOUT_S)
        assert (pair.dst == GUARD).all()
        assert pair.target.arrived(TAG) == 4


@pytest.mark.parametrize("ranges", [[], np.zeros((0, 2), np.uint64)])
def test_a_tag_without_any_range_counts_empty_transfers(pair: Pair, ranges: Any) -> None:
    pair.target.expect(TAG, ranges=ranges)
    assert pair.peer.write(EMPTY, TAG).wait(TIMEOUT_S) is te.Status.DONE
    if not pair.way.looks_up_all:
        with pytest.raises(te.TransferFailed, match="outside the ranges"):
            does(pair, "tagged write", 1)
    assert pair.target.arrived(TAG) == 1


# -- rights of regions


@pytest.mark.parametrize("remote", WORDS)
def test_each_right_allows_what_it_says_and_nothing_else(way: Way, remote: Remote) -> None:
    with paired(way, NBYTES, remote=remote) as pair:
        pair.target.expect(TAG)
        near, far = np.full(NBYTES, 1, np.uint8), np.full(NBYTES, 2, np.uint8)
        for what, nbytes in itertools.product(("write", "tagged write", "read"), SIZES):
            pair.src[:], pair.dst[:] = near, far
            says = VERDICTS[remote, what]
            if says is None:
                assert does(pair, what, nbytes) is te.Status.DONE
                assert (pair.src[:nbytes] == pair.dst[:nbytes]).all() == way.moves_bytes
                continue
            side = "source" if what == "read" else "destination"
            start = f"the {side}: {nbytes} bytes at {pair.dst_region.address:#x} .*"
            with pytest.raises(te.TransferFailed, match=start + says):
                does(pair, what, nbytes)
            assert (pair.src == near).all()
            assert (pair.dst == far).all()
        assert pair.peer.alive
        assert pair.target.arrived(TAG) == 2 * (VERDICTS[remote, "tagged write"] is None)


@pytest.mark.parametrize("remote", WORDS)
def test_an_engine_itself_may_use_a_region_of_any_right(way: Way, remote: Remote) -> None:
    with paired(way, NBYTES) as pair:
        own = np.full(8192, 3, np.uint8)
        region = pair.source.register(own, remote=remote)
        assert region.remote == remote
        far = pair.dst_region.address
        for nbytes in SIZES:
            own[:], pair.dst[:] = 3, GUARD
            write = pair.peer.write(te.Blocks.of(region.address, far, nbytes))
            assert write.wait(TIMEOUT_S) is te.Status.DONE
            pair.assert_moved(
                pair.dst[:nbytes], np.full(nbytes, GUARD, np.uint8), np.full(nbytes, 3, np.uint8)
            )
            pair.dst[:] = 4
            read = pair.peer.read(te.Blocks.of(far, region.address, nbytes))
            assert read.wait(TIMEOUT_S) is te.Status.DONE
            pair.assert_moved(
                own[:nbytes], np.full(nbytes, 3, np.uint8), np.full(nbytes, 4, np.uint8)
            )
            assert (own[nbytes:] == 3).all()


def test_of_regions_that_touch_each_must_allow_it(way: Way) -> None:
    with paired(way, NBYTES) as pair:
        more = np.full(8192, 5, np.uint8)
        address = int(more.ctypes.data)
        pair.target.register(address, 4096, remote="read-write")
        pair.target.register(address + 4096, 4096, remote="read")
        near = pair.src_region.address
        assert pair.peer.read(te.Blocks.of(address + 4000, near, 97)).wait(TIMEOUT_S)
        with pytest.raises(
            te.TransferFailed, match=f"97 bytes at {address + 4000:#x} .* may not write"
        ):
            pair.peer.write(te.Blocks.of(near, address + 4000, 97)).wait(TIMEOUT_S)
        assert (more == 5).all()
