# SPDX-License-Identifier: Apache-2.0
"""The latest digests that a prefill rank has sent."""

from __future__ import annotations

import pytest

from sglang_mooncake import sent_lately
from sglang_mooncake.layout import Verify
from sglang_mooncake.messages import ListDigests, RoomDiffers, RoomDigests
from sglang_mooncake.rooms.prefill_events import Digest
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sent_lately import SentLately


def lists(items: int, buffers: int = 1) -> tuple[ListDigests, ...]:
    return (ListDigests(0, bytes(4 * items), bytes(8 * items), bytes(8 * buffers)),)


def add(lately: SentLately, number: int, items: int = 1, peer: str = "a") -> None:
    message = RoomDigests(number, 1, Verify.ALL, lists=lists(items))
    asked = Digest(Room(number, 0.0), peer, 1, Verify.ALL, 0, tuple)
    lately.add(asked, message)


def is_known(
    lately: SentLately, number: int, peer: str = "a", generation: int = 1, items: int = 1
) -> bool:
    try:
        lately.take(peer, RoomDiffers(number, generation, lists(items)))
    except ValueError:
        return False
    return True


def test_a_peer_has_memory_looked_at_once_and_only_its_own() -> None:
    lately = SentLately()
    add(lately, 1)
    assert not is_known(lately, 1, peer="b")
    assert not is_known(lately, 1, generation=2)
    assert is_known(lately, 1)
    assert not is_known(lately, 1)


@pytest.mark.parametrize(
    "told",
    [(), lists(2), lists(1, buffers=2), 2 * lists(1)],
    ids=["none", "item", "buffer", "list"],
)
def test_digests_of_other_cells_than_were_sent_are_no_answer(told) -> None:
    lately = SentLately()
    add(lately, 1)
    with pytest.raises(ValueError, match="digests of other cells were told"):
        lately.take("a", RoomDiffers(1, 1, told))
    assert not is_known(lately, 1)


@pytest.mark.parametrize(("rooms_max", "items_max"), [(2, 100), (100, 20)])
def test_the_latest_are_known_and_no_more_than_there_is_room_for(
    rooms_max, items_max, monkeypatch
) -> None:
    monkeypatch.setattr(sent_lately, "ROOMS_MAX", rooms_max)
    monkeypatch.setattr(sent_lately, "ITEMS_MAX", items_max)
    lately = SentLately()
    for _ in range(2):  # what was taken makes room
        for number in (1, 2, 3):
            add(lately, number, items=10)
        known = [is_known(lately, number, items=10) for number in (1, 2, 3)]
        assert known == [False, True, True]
    add(lately, 1, items=items_max + 1)
    assert not is_known(lately, 1, items=items_max + 1)


def test_digests_that_are_made_once_more_take_the_place_of_the_former_ones(monkeypatch) -> None:
    monkeypatch.setattr(sent_lately, "ITEMS_MAX", 20)
    lately = SentLately()
    for number in (1, 1, 2):
        add(lately, number, items=10)
    assert [is_known(lately, number, items=10) for number in (1, 2)] == [True, True]
