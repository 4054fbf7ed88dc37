# SPDX-License-Identifier: Apache-2.0
"""The pure rules of agents over te: registrations, metadata, the life of a handle, messages."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.faces.nixl import metadata, remotes
from sglang_mooncake.faces.nixl.inbox import MESSAGE_BYTES_MAX, bytes_of, merge, packed, unpacked
from sglang_mooncake.faces.nixl.life import Event, Life, after, check_asked
from sglang_mooncake.faces.nixl.names import (
    ERRORS,
    InvalidParam,
    Mismatch,
    NixlError,
    NotFound,
    NotPosted,
    RepostActive,
    Segment,
)
from sglang_mooncake.faces.nixl.prepared import Columns, Cover
from sglang_mooncake.faces.nixl.registrations import Range, Registrations
from sglang_mooncake.faces.nixl.remotes import Remote

DRAM = Segment.DRAM_SEG


def at(address: int, nbytes: int, device: int = 0) -> Range:
    return Range(DRAM, device, address, nbytes)


steps = st.lists(
    st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 12), st.integers(0, 1)), max_size=25
)


@given(steps)
def test_regions_are_disjoint_and_cover_what_is_registered(
    plan: list[tuple[bool, int, int, int]],
) -> None:
    known: Registrations[tuple[int, int]] = Registrations()
    held: list[Range] = []
    for is_taken_back, address, nbytes, device in plan:
        if is_taken_back and held:
            one = held.pop(address % len(held))
            freed = known.freed(one)
            known.remove(one)
            # What goes is needed by nobody who is left.
            for start, end in freed:
                assert not any(other.address < end and start < other.end for other in held)
        else:
            one = at(address, nbytes, device)
            gaps = known.gaps(one)
            known.add(one, [(start, size, (start, start + size)) for start, size in gaps])
            held.append(one)
        regions = known.regions()
        assert all(before[1] <= behind[0] for before, behind in pairwise(regions))
        covered = {byte for start, end in regions for byte in range(start, end)}
        assert all(set(range(one.address, one.end)) <= covered for one in held)
        assert all(
            any(one.address < end and start < one.end for one in held) for start, end in regions
        )
        assert set(known.ranges()) == set(held)
        assert all(known.times(one) == held.count(one) for one in held)


@given(steps)
def test_several_that_are_given_back_free_what_one_after_the_other_frees(
    plan: list[tuple[bool, int, int, int]],
) -> None:
    known: Registrations[int] = Registrations()
    held: list[Range] = []
    given_back: list[Range] = []
    for is_given_back, address, nbytes, device in plan:
        one = at(address, nbytes, device)
        known.add(one, [(start, size, start) for start, size in known.gaps(one)])
        (given_back if is_given_back else held).append(one)
    freed = known.freed(*given_back)
    one_by_one = []
    for one in given_back:
        one_by_one += known.freed(one)
        known.remove(one)
    assert sorted(freed) == sorted(one_by_one)


def test_what_is_not_registered_is_not_given_back() -> None:
    known: Registrations[str] = Registrations()
    known.add(at(0, 10), [(0, 10, "a")])
    with pytest.raises(KeyError):
        known.freed(at(0, 9))
    with pytest.raises(KeyError):
        known.freed(at(0, 10, device=1))


ranges = st.lists(
    st.builds(
        Range,
        st.sampled_from(Segment),
        st.integers(0, 9),
        st.integers(0, 1 << 62),
        st.integers(1, 1 << 40),
    ),
    max_size=5,
)


@given(st.text(min_size=1, max_size=20), st.binary(max_size=50), st.booleans(), ranges)
def test_metadata_comes_back(name: str, card: bytes, is_whole: bool, known: list[Range]) -> None:
    told = metadata.decode(metadata.encode(name, card, is_whole, 7, known))
    assert (told.name, told.card, told.is_whole, told.generation) == (name, card, is_whole, 7)
    assert told.ranges.tolist() == [[one.address, one.nbytes] for one in known]


@given(st.binary(max_size=60))
def test_other_bytes_are_no_metadata(data: bytes) -> None:
    with pytest.raises(Mismatch):
        metadata.decode(data)


@given(st.integers(0, 200), st.integers(1, 255))
def test_damaged_metadata_is_refused_or_another_agents(place: int, change: int) -> None:
    whole = bytearray(metadata.encode("agent", b"card", True, 1, [at(4096, 100)]))
    whole[place % len(whole)] ^= change
    try:
        told = metadata.decode(bytes(whole))
    except Mismatch:
        return
    assert told.name
    assert told.generation >= 0


def test_the_real_ones_metadata_is_told_in_one_sentence() -> None:
    with pytest.raises(Mismatch, match="both sides need sglang-mooncake's nixl, or both NVIDIA's"):
        metadata.decode(b"nixlSerDes|Agent\x00\x00")


def test_metadata_of_another_version_is_told_apart() -> None:
    data = metadata.encode("agent", b"", True, 0, [])
    other = data[: len(metadata.MAGIC)] + b"\x63" + data[len(metadata.MAGIC) + 1 :]
    with pytest.raises(Mismatch, match="version 63"):
        metadata.decode(other)


def test_what_is_learnt_while_another_thread_asks_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = Remote("b", ("id", 1), cast(Any, None))
    old, new = (
        metadata.decode(metadata.encode("b", b"card", True, generation, [at(64, nbytes)]))
        for generation, nbytes in ((1, 8), (2, 16))
    )
    remote.learn(old)

    def slow(ranges: Any) -> Cover:
        monkeypatch.undo()
        remote.learn(new)  # As another thread does meanwhile.
        return Cover(ranges)

    monkeypatch.setattr(remotes, "Cover", slow)
    assert remote.cover.first_outside(columns(64, 8)) is None
    assert remote.cover.first_outside(columns(64, 16)) is None


def columns(address: int, nbytes: int) -> Columns:
    return Columns(np.array([address], np.uint64), np.array([nbytes], np.uint64))


@pytest.mark.parametrize("wrong", [at(1 << 62, 1 << 63), Range(9, 0, 1, 1)])  # type: ignore[arg-type]
def test_registrations_that_cannot_be_are_refused(wrong: Range) -> None:
    with pytest.raises(Mismatch, match="cannot be"):
        metadata.decode(metadata.encode("agent", b"", True, 0, [wrong]))


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_a_life_goes_on_until_it_is_released(events: list[Event]) -> None:
    """Whatever is asked, a handle is under way only between a post and an end, and what was
    released stays so."""
    life = Life.IDLE
    for event in events:
        before = life
        try:
            life = after(life, event)
        except (RepostActive, NotFound):
            assert event is Event.POST
            assert before in (Life.QUEUED, Life.MOVING, Life.STOPPING, Life.RELEASED)
        except AssertionError:
            continue
        if before is Life.RELEASED:
            assert life is Life.RELEASED
        if before is Life.MOVING and event in (Event.RELEASE, Event.STOP):
            assert life is Life.STOPPING  # te has not said yet that it has done with the memory
    if life is Life.IDLE:
        with pytest.raises(NotPosted):
            check_asked(life)


@pytest.mark.parametrize("life", [Life.RELEASED, Life.STOPPING])
def test_what_was_released_is_not_known(life: Life) -> None:
    with pytest.raises(NotFound):
        check_asked(life)


@given(st.text(min_size=1, max_size=30), st.binary(max_size=100))
def test_a_message_names_its_sender(sender: str, message: bytes) -> None:
    assert unpacked(packed(sender, message)) == (sender, message)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\0abc", b"\0\5abc", b"\xff\xff" + b"x" * 100])
def test_a_message_without_a_sender_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="names no sender"):
        unpacked(data)


def test_messages_are_bytes_and_not_too_long() -> None:
    assert bytes_of("ü") == "ü".encode()
    assert len(bytes_of(b"x" * MESSAGE_BYTES_MAX)) == MESSAGE_BYTES_MAX
    with pytest.raises(InvalidParam, match="at most"):
        bytes_of(b"x" * (MESSAGE_BYTES_MAX + 1))


def test_messages_are_kept_in_their_order() -> None:
    known = merge({"a": [b"1"]}, [("b", b"2"), ("a", b"3"), ("a", b"1")])
    assert known == {"a": [b"1", b"3", b"1"], "b": [b"2"]}


def test_errors_have_nixls_names_and_say_nixls_status() -> None:
    for name, one in ERRORS.items():
        assert one.__mro__[1:3] == (NixlError, Exception)
        assert one.__name__ == name
    assert str(NotFound("no such agent")) == "NIXL_ERR_NOT_FOUND: no such agent"
