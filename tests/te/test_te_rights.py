# SPDX-License-Identifier: Apache-2.0
"""Rights as they are given and looked up; what peers see of them: test_te_contract_rights.py."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Self, cast

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


_U64, _PTR = ctypes.c_uint64, ctypes.c_void_p
_malloc = ctypes.CFUNCTYPE(_PTR, ctypes.c_size_t)(("malloc", ctypes.CDLL(None)))
_normalise = function("te.core.tags", "ranges_normalise", _U64, _PTR, _U64)
_new = function("te.core.tags", "opening_new", _PTR, _U64, _PTR, _U64)
_covers = function("te.core.tags", "opening_covers", ctypes.c_int, _PTR, _U64, _U64)
_drop = function("te.core.tags", "opening_drop", None, _PTR)


class Opened:
    """What a tag is opened for. ``pieces``: its ranges, as (start, end)."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        packed = packed_ranges(ranges)
        made = _malloc(len(packed) + 1)  # The opening frees it.
        ctypes.memmove(made, packed, len(packed))
        count = int(_normalise(made, len(ranges)))
        self.pieces = list(struct.iter_unpack("<QQ", ctypes.string_at(made, 16 * count)))
        self._opening = _new(TAG, made, count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _drop(self._opening)

    def covers(self, address: int, nbytes: int) -> bool:
        return bool(_covers(self._opening, address, nbytes))


numbers = st.integers(0, 40)


@given(st.lists(st.tuples(numbers, st.integers(1, 9)), max_size=12), numbers, st.integers(1, 20))
def test_ranges_are_looked_up_as_byte_by_byte(
    ranges: list[tuple[int, int]], address: int, nbytes: int
) -> None:
    allowed = {byte for start, size in ranges for byte in range(start, start + size)}
    with Opened(ranges) as opened:
        assert opened.covers(address, nbytes) == allowed.issuperset(
            range(address, address + nbytes)
        )
        assert len(opened.pieces) == len(allowed) - len(
            {one for one in allowed if one + 1 in allowed}
        )


@pytest.mark.parametrize("bits", [13, 40, 62])
def test_many_ranges_are_looked_up_alike(bits: int) -> None:
    """Above some hundred they are sorted and found in other ways, dense or far apart."""
    random = np.random.default_rng(bits)
    ranges = [(int(one), 4) for one in random.integers(16, 1 << bits, 3000)]
    pieces: list[tuple[int, int]] = []
    for start, size in sorted(ranges):
        if pieces and start <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], start + size)
        else:
            pieces.append((start, start + size))
    with Opened(ranges) as opened:
        assert opened.pieces == pieces
        for start, end in pieces:
            assert opened.covers(start, end - start)
            assert not opened.covers(start - 1, 2)
            assert not opened.covers(end - 1, 2)
        for address in (0, 15, 1 << 63, (1 << 64) - 1):
            assert not opened.covers(address, 1)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_no_address_is_too_high_for_the_look_up(address: int, nbytes: int) -> None:
    ranges = [(16, 1 << 62), ((1 << 63) - 2, 1)]
    is_in = any(start <= address and address + nbytes <= start + size for start, size in ranges)
    with Opened(ranges) as opened:
        assert len(opened.pieces) == 2
        assert opened.covers(address, nbytes) == is_in


def test_an_engine_is_packed_as_on_the_wire_of_nobody() -> None:
    """Which life, if that is told; else all of them."""
    assert packed_peer("0a" * 16) == b"\x0a" * 16
    assert packed_peer(te.Identity("0a" * 16, 7)) == b"\x0a" * 16 + struct.pack("<Q", 7)
