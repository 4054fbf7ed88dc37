# SPDX-License-Identifier: Apache-2.0
"""Rights as they are given and looked up; what peers see of them: test_te_contract_rights.py."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_compiled import function

import te
from te.handshake import decode_card
from te.memory import RIGHTS, Remote
from te.memory_kinds import HOST
from te.tags import packed_peer, packed_ranges
from te.topology import Topology
from te.verbs.fabric import Fabric

TAG = te.new_tag()
WORDS: list[Remote] = list(RIGHTS)


def test_what_is_for_nobody_is_told_to_nobody() -> None:
    with te.Engine() as engine:
        shown = [engine.register(bytearray(8), remote=one).address for one in WORDS[:3]]
        engine.register(bytearray(8), remote="none")
        assert [one.address for one in decode_card(engine.card()).regions] == sorted(shown)


def test_a_word_that_is_no_right_is_refused() -> None:
    says = "remote='write' is none of tagged, read, read-tagged, read-write, none"
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
    index, name, max_region_bytes = 0, "mlx5_0", 1 << 40

    def __init__(self, family: str) -> None:
        self.family, self.device = family, FakeDevice()


@pytest.mark.parametrize("family", ["ib", "roce", "iwarp"])
def test_keys_allow_no_more_than_the_region_but_for_iwarp(family: str) -> None:
    """Where a read's destination has to be open to writes of the side that it is read from."""
    nic = FakeNic(family)
    fabric = Fabric((cast("Any", nic),), Topology((), {}, gpus={}, far={}), (0,))
    for remote in WORDS:
        fabric.register(4096, 4096, RIGHTS[remote], HOST)
    wanted = {"none": (0, 0), "read": (1, 0), "tagged": (0, 1)}
    wanted |= {"read-tagged": (1, 1), "read-write": (1, 1)}
    assert nic.device.rights == [
        (bool(wanted[one][0]), bool(wanted[one][1]) or family == "iwarp") for one in WORDS
    ]


# -- tags

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


_U64 = ctypes.c_uint64
_normalise = function("te.core.tags", "ranges_normalise", _U64, ctypes.c_void_p, _U64)
_cover = function("te.core.tags", "ranges_cover", ctypes.c_int, ctypes.c_void_p, _U64, _U64, _U64)


def cover(packed: bytes, address: int, nbytes: int) -> tuple[int, bool]:
    """How many ranges are left of a tag's, and whether these bytes may be written under it."""
    made = ctypes.create_string_buffer(packed, len(packed) + 1)
    count = int(_normalise(made, len(packed) // 16))
    return count, bool(_cover(made, count, address, nbytes))


numbers = st.integers(0, 40)


@given(st.lists(st.tuples(numbers, st.integers(1, 9)), max_size=12), numbers, st.integers(1, 20))
def test_ranges_are_looked_up_as_byte_by_byte(
    ranges: list[tuple[int, int]], address: int, nbytes: int
) -> None:
    allowed = {byte for start, size in ranges for byte in range(start, start + size)}
    count, covered = cover(packed_ranges(ranges), address, nbytes)
    assert covered == allowed.issuperset(range(address, address + nbytes))
    assert count == len(allowed) - len({byte for byte in allowed if byte + 1 in allowed})


@pytest.mark.parametrize("limit", [1 << 13, 1 << 40, 1 << 62], ids=["dense", "apart", "far"])
def test_many_ranges_are_looked_up_alike(limit: int) -> None:
    """Above some hundred they are sorted in another way."""
    random = np.random.default_rng(limit)
    ranges = [(int(one), 4) for one in random.integers(16, limit, 3000)]
    pieces: list[list[int]] = []
    for start, size in sorted(ranges):
        if pieces and start <= pieces[-1][1]:
            pieces[-1][1] = max(pieces[-1][1], start + size)
        else:
            pieces.append([start, start + size])
    made = ctypes.create_string_buffer(packed_ranges(ranges), 16 * len(ranges))
    assert _normalise(made, len(ranges)) == len(pieces)
    assert [list(one) for one in struct.iter_unpack("<QQ", made.raw)][: len(pieces)] == pieces
    for start, end in pieces:
        assert _cover(made, len(pieces), start, end - start)
        assert not _cover(made, len(pieces), start - 1, 2)
        assert not _cover(made, len(pieces), end - 1, 2)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_no_address_is_too_high_for_the_look_up(address: int, nbytes: int) -> None:
    ranges = [(16, 1 << 62), ((1 << 63) - 2, 1)]
    is_in = any(start <= address and address + nbytes <= start + size for start, size in ranges)
    assert cover(packed_ranges(ranges), address, nbytes) == (2, is_in)


def test_an_engine_is_packed_as_on_the_wire_of_nobody() -> None:
    """Which life, if that is told; else all of them."""
    assert packed_peer("0a" * 16) == b"\x0a" * 16
    assert packed_peer(te.Identity("0a" * 16, 7)) == b"\x0a" * 16 + struct.pack("<Q", 7)
