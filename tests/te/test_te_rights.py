# SPDX-License-Identifier: Apache-2.0
"""What peers may do with registered memory: by the region, by the tag's peer, by its ranges."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te.core.tags import cover
from te_transports import TRANSPORTS

import te
from te.handshake import decode_card
from te.memory import RIGHTS, Remote
from te.memory_kinds import HOST
from te.tags import packed_peer, packed_ranges
from te.topology import Topology
from te.verbs.fabric import Fabric

TIMEOUT_S = 20.0
TAG = te.new_tag()
#: The smallest that goes without the rings on the same host, and one that goes through them.
SIZES = (64, 8192)
WORDS: list[Remote] = list(RIGHTS)

NOT_READ = r'may not read; register it there with remote="read" or "read-write"'
NOT_WRITTEN = r'may not write; register it there with remote="tagged" or "read-write"'
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
    ("read-write", "write"): None,
    ("read-write", "tagged write"): None,
    ("read-write", "read"): None,
}


class Pair:
    """A source that writes and reads in a target's memory."""

    def __init__(self, source: te.Engine, target: te.Engine, remote: Remote) -> None:
        self.source, self.target = source, target
        self.near = np.full(1 << 14, 1, np.uint8)
        self.far = np.full(1 << 14, 2, np.uint8)
        source.register(self.near, remote="none")
        self.region = target.register(self.far, remote=remote)
        self.peer = source.connect(target.card())

    def does(self, what: str, nbytes: int, at: int = 0, tag: int = TAG) -> te.Status:
        near, far = self.near.ctypes.data, self.far.ctypes.data + at
        if what == "read":
            transfer = self.peer.read(te.Blocks.of(far, near, nbytes))
        else:
            transfer = self.peer.write(te.Blocks.of(near, far, nbytes), tag * (what != "write"))
        assert transfer.wait(TIMEOUT_S)
        return transfer.poll()


@pytest.fixture(params=TRANSPORTS)
def engines(request: pytest.FixtureRequest) -> Iterator[tuple[te.Engine, te.Engine]]:
    config = te.Config(transports=(request.param,))
    with te.Engine(config) as source, te.Engine(config) as target:
        yield source, target


Engines = tuple[te.Engine, te.Engine]


@pytest.mark.parametrize("remote", WORDS)
def test_each_right_allows_what_it_says_and_nothing_else(engines: Engines, remote: Remote) -> None:
    pair = Pair(*engines, remote)
    engines[1].expect(TAG)
    for what, nbytes in itertools.product(("write", "tagged write", "read"), SIZES):
        pair.near[:], pair.far[:] = 1, 2
        says = VERDICTS[remote, what]
        if says is None:
            assert pair.does(what, nbytes) is te.Status.DONE
            assert (pair.near[:nbytes] == pair.far[:nbytes]).all()
        else:
            side = "source" if what == "read" else "destination"
            start = f"the {side}: {nbytes} bytes at {pair.far.ctypes.data:#x} .*"
            with pytest.raises(te.TransferFailed, match=start + says):
                pair.does(what, nbytes)
            assert (pair.near == 1).all()
            assert (pair.far == 2).all()
    assert pair.peer.alive
    assert engines[1].arrived(TAG) == 2 * (VERDICTS[remote, "tagged write"] is None)


@pytest.mark.parametrize("remote", WORDS)
def test_an_engine_itself_may_use_a_region_of_any_right(engines: Engines, remote: Remote) -> None:
    pair = Pair(*engines, "read-write")
    own = np.full(8192, 3, np.uint8)
    region = engines[0].register(own, remote=remote)
    assert region.remote == remote
    for nbytes in SIZES:
        own[:] = 3
        pair.peer.write(te.Blocks.of(region.address, pair.region.address, nbytes)).wait(TIMEOUT_S)
        assert (pair.far[:nbytes] == 3).all()
        pair.far[:] = 4
        pair.peer.read(te.Blocks.of(pair.region.address, region.address, nbytes)).wait(TIMEOUT_S)
        assert (own[:nbytes] == 4).all()
        assert (own[nbytes:] == 3).all()


def test_of_regions_that_touch_each_must_allow_it(engines: Engines) -> None:
    source, target = engines
    pair = Pair(source, target, "read-write")
    more = np.full(8192, 5, np.uint8)
    address = int(more.ctypes.data)
    target.register(address, 4096, remote="read-write")
    target.register(address + 4096, 4096, remote="read")
    there = te.Blocks.of(pair.near.ctypes.data, address + 4000, 97)
    back = te.Blocks.of(address + 4000, pair.near.ctypes.data, 97)
    assert pair.peer.read(back).wait(TIMEOUT_S)
    with pytest.raises(
        te.TransferFailed, match=f"97 bytes at {address + 4000:#x} .* may not write"
    ):
        pair.peer.write(there).wait(TIMEOUT_S)
    assert (more == 5).all()


def test_what_is_for_nobody_is_told_to_nobody() -> None:
    with te.Engine() as engine:
        shown = [engine.register(bytearray(8), remote=one).address for one in WORDS[:3]]
        engine.register(bytearray(8), remote="none")
        assert [one.address for one in decode_card(engine.card()).regions] == sorted(shown)


def test_a_word_that_is_no_right_is_refused() -> None:
    says = "remote='write' is none of tagged, read, read-write, none"
    with te.Engine() as engine, pytest.raises(te.RegistrationError, match=says):
        engine.register(bytearray(8), remote=cast("Any", "write"))


# -- keys


class FakeDevice:
    """Notes with what rights memory is registered."""

    def __init__(self) -> None:
        self.rights: list[tuple[bool, bool]] = []
        self.lkey = self.rkey = 1

    def register(self, *_: int, relaxed: bool, remote_read: bool, remote_write: bool) -> FakeDevice:
        self.rights.append((remote_read, remote_write))
        return self

    def close(self) -> None:
        pass


class FakeNic:
    index, max_region_bytes = 0, 1 << 40

    def __init__(self, family: str) -> None:
        self.family, self.device = family, FakeDevice()


@pytest.mark.parametrize("family", ["ib", "roce", "iwarp"])
def test_keys_allow_no_more_than_the_region_but_for_iwarp(family: str) -> None:
    """Where a read's destination has to be open to writes of the side that it is read from."""
    nic = FakeNic(family)
    fabric = Fabric((cast("Any", nic),), Topology((), {}, gpus={}, far={}), (0,))
    for remote in WORDS:
        fabric.register(4096, 4096, RIGHTS[remote], HOST)
    wanted = {"none": (0, 0), "read": (1, 0), "tagged": (0, 1), "read-write": (1, 1)}
    assert nic.device.rights == [
        (bool(wanted[one][0]), bool(wanted[one][1]) or family == "iwarp") for one in WORDS
    ]


# -- tags for one peer


def test_a_tag_is_for_whom_it_was_opened(engines: Engines) -> None:
    source, target = engines
    pair = Pair(source, target, "tagged")
    life, before = te.Identity(source.id, source.epoch), te.Identity(source.id, source.epoch - 1)
    for peer in (source.id, source, life, None):
        target.expect(TAG, peer=peer)
        assert pair.does("tagged write", 64) is te.Status.DONE
        assert target.fence(TAG) == 1
    pair.far[:] = 2
    says = f"the tag {TAG:#x} is not open here: never expected, fenced, or expected from another"
    for other in (target.id, target, before):
        target.expect(TAG, peer=other)
        for nbytes in SIZES:
            with pytest.raises(te.TransferFailed, match=says):
                pair.does("tagged write", nbytes)
        with pytest.raises(te.TransferFailed, match=says):
            pair.peer.write(te.Blocks.of([], [], []), TAG).wait(TIMEOUT_S)
        assert target.fence(TAG) == 0
    with pytest.raises(te.TransferFailed, match=says):  # The same where nobody may write.
        pair.does("tagged write", 64)
    assert (pair.far == 2).all()
    assert pair.peer.alive


def test_of_two_peers_one_may_write_under_a_tag() -> None:
    with te.Engine() as one, te.Engine() as other, te.Engine() as target:
        first, second = Pair(one, target, "tagged"), Pair(other, target, "tagged")
        target.expect(TAG, peer=second.source)
        with pytest.raises(te.TransferFailed, match="is not open here"):
            first.does("tagged write", 64)
        assert second.does("tagged write", 64) is te.Status.DONE
        assert (first.far == 2).all()
        assert target.arrived(TAG) == 1


# -- ranges of tags

BYTES_TRANSPORTS = [one for one in TRANSPORTS if one.values != ("rdma",)]


@pytest.mark.parametrize("transport", BYTES_TRANSPORTS)
def test_writes_outside_the_ranges_of_their_tag_are_refused(transport: str) -> None:
    config = te.Config(transports=(transport,))
    with te.Engine(config) as source, te.Engine(config) as target:
        pair = Pair(source, target, "tagged")
        base = int(pair.far.ctypes.data)
        # The first two are one; of the last a part is not registered.
        ranges = [(base + 1000, 1000), (base, 1000), (base + 9000, 1 << 20)]
        target.expect(TAG, ranges=ranges)
        for at, nbytes in ((0, 2000), (900, 200), (9000, 64), (9000, 7000)):
            assert pair.does("tagged write", nbytes, at) is te.Status.DONE
        assert (np.flatnonzero(pair.far == 1) == [*range(2000), *range(9000, 16000)]).all()
        says = rf"the destination: .* outside the ranges that the tag {TAG:#x} was opened for"
        pair.far[:] = 2
        for at, nbytes in ((0, 2001), (2000, 1), (8999, 64), (1900, 8192)):
            with pytest.raises(te.TransferFailed, match=f"{nbytes} bytes at {base + at:#x} lie "):
                pair.does("tagged write", nbytes, at)
            with pytest.raises(te.TransferFailed, match=says):
                pair.does("tagged write", nbytes, at)
        blocks = te.Blocks.of(pair.near.ctypes.data, base + np.array([0, 5000]), 64)
        with pytest.raises(te.TransferFailed, match=says):
            pair.peer.write(blocks, TAG).wait(TIMEOUT_S)
        with pytest.raises(te.TransferFailed, match="outside the registered memory"):
            pair.does("tagged write", 64, 16384 - 32)
        assert (pair.far == 2).all()


@pytest.mark.parametrize("ranges", [[], np.zeros((0, 2), np.uint64)])
def test_a_tag_without_any_range_counts_empty_transfers(ranges: Any) -> None:
    with te.Engine() as source, te.Engine() as target:
        pair = Pair(source, target, "tagged")
        target.expect(TAG, ranges=ranges)
        assert pair.peer.write(te.Blocks.of([], [], []), TAG).wait(TIMEOUT_S)
        with pytest.raises(te.TransferFailed, match="outside the ranges"):
            pair.does("tagged write", 1)
        assert target.arrived(TAG) == 1


LIMIT = 65_536


@pytest.mark.parametrize(
    ("given_as", "says"),
    [
        ({"peer": "abc"}, "'abc' is no engine's id, which has 32 hex digits"),
        ({"peer": te.Identity("0" * 32, -1)}, "-1 is no engine's epoch"),
        (
            {"ranges": [(1, 2, 3)]},
            r"shape \(n, 2\), address and bytes, not int64 of shape \(1, 3\)",
        ),
        ({"ranges": [1, 2]}, r"of shape \(2,\)"),
        ({"ranges": [(1.5, 2.0)]}, "not float64"),
        ({"ranges": [(4096, 0)]}, "needs at least one byte"),
        ({"ranges": [(-1, 5)]}, r"between 0 and 2\*\*63"),
        ({"ranges": np.array([(1 << 63, 5)], np.uint64)}, r"between 0 and 2\*\*63"),
        (
            {"ranges": [(3 * i, 1) for i in range(LIMIT + 1)]},
            f"{LIMIT + 1} separate ranges; at most {LIMIT}",
        ),
    ],
)
def test_a_tag_that_cannot_be_opened_is_not_known(given_as: dict[str, Any], says: str) -> None:
    with te.Engine() as engine:
        with pytest.raises(ValueError, match=says):
            engine.expect(TAG, **given_as)
        # In as few pieces as it may be, however many were given.
        engine.expect(TAG, ranges=[(i, 2) for i in range(LIMIT + 1)])


def test_new_tags_are_all_different_and_can_be_expected() -> None:
    tags = {te.new_tag() for _ in range(1000)}
    assert len(tags) == 1000
    with te.Engine() as engine:
        for tag in tags:
            engine.expect(tag)


numbers = st.integers(0, 40)


@given(st.lists(st.tuples(numbers, st.integers(1, 9)), max_size=12), numbers, st.integers(1, 20))
def test_ranges_are_looked_up_as_byte_by_byte(
    ranges: list[tuple[int, int]], address: int, nbytes: int
) -> None:
    allowed = {byte for start, size in ranges for byte in range(start, start + size)}
    count, covered = cover(packed_ranges(ranges), address, nbytes)
    assert covered == allowed.issuperset(range(address, address + nbytes))
    assert count == len(allowed) - len({byte for byte in allowed if byte + 1 in allowed})


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_no_address_is_too_high_for_the_look_up(address: int, nbytes: int) -> None:
    ranges = [(16, 1 << 62), ((1 << 63) - 2, 1)]
    is_in = any(start <= address and address + nbytes <= start + size for start, size in ranges)
    assert cover(packed_ranges(ranges), address, nbytes) == (2, is_in)


def test_an_engine_is_packed_as_on_the_wire_of_nobody() -> None:
    """Which life, if that is told; else all of them."""
    assert packed_peer("0a" * 16) == b"\x0a" * 16
    assert packed_peer(te.Identity("0a" * 16, 7)) == b"\x0a" * 16 + struct.pack("<Q", 7)
