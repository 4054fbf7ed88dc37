# SPDX-License-Identifier: Apache-2.0
"""What LMCache hears of what lies in the store, removes from it, and locks in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import KeyListPage, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig
from lmcache.v1.distributed.quota_manager import QuotaManager
from lmcache.v1.distributed.storage_controllers.eviction_controller import (
    L2AdapterEvictionState,
    L2EvictionController,
)
from lmcache_makers import MIB, Level1, config, key, keys, layout, load, look_up, store
from store_makers import until

from kvstore.lmcache import books
from kvstore.lmcache.adapter import StoreL2Adapter
from kvstore.lmcache.names import keys_of_objects
from kvstore.objects.outcomes import Removed
from kvstore.store import Store

N = 5
NBYTES = layout().shapes[0].numel() * 2
KEYS = keys(N)
ALL = list(range(N))
LAYOUTS = {0: layout()}


class Heard:
    """LMCache's listener: what it takes for stored."""

    def __init__(self) -> None:
        self.sizes: dict[ObjectKey, int] = {}

    def on_l2_keys_stored(self, names: list[ObjectKey], sizes: list[int]) -> None:
        assert not set(names) & set(self.sizes), "none is told twice"
        self.sizes |= dict(zip(names, sizes, strict=True))

    def on_l2_keys_accessed(self, names: list[ObjectKey]) -> None:
        pass

    def on_l2_keys_deleted(self, names: list[ObjectKey]) -> None:
        for one in names:
            del self.sizes[one]


@pytest.fixture
def heard(adapter: StoreL2Adapter) -> Heard:
    one = Heard()
    adapter.register_listener(one)
    return one


@pytest.fixture
def other(adapter: StoreL2Adapter, directory: Path, level1: Level1) -> Iterator[StoreL2Adapter]:
    """Of another server. Lends nothing."""
    one = StoreL2Adapter(config(directory, memory=0), l1_memory_desc=level1.desc)
    until(lambda: one.report_status()["usable_owners"], "it finds the owner")
    yield one
    one.close()


def listed(page: KeyListPage) -> list[ObjectKey]:
    return [one.key.to_object_key() for one in page.entries]


# -- what is deleted, and what it counts


def test_quotas_by_salt_are_kept(adapter: StoreL2Adapter, level1: Level1) -> None:
    """By LMCache's own controller: the oldest of who has too much go, and none of another's."""
    state = L2AdapterEvictionState(0, adapter, EvictionConfig("IsolatedLRU", 0.8, 0.5))
    quotas = QuotaManager()
    quotas.set_quota("alice", 4 * NBYTES)
    quotas.set_quota("bob", 100 * NBYTES)
    controller = L2EvictionController([state], quota_manager=quotas)
    names = {salt: keys(4, cache_salt=salt) for salt in ("bob", "alice", "nobody")}
    for some in names.values():
        for one in some:
            assert store(adapter, [one], level1.objects(1, seed=1)).is_successful()
    controller._check_and_evict(state)
    assert adapter.get_usage().bytes_by_cache_salt == {"alice": 2 * NBYTES, "bob": 4 * NBYTES}
    found = {salt: look_up(adapter, some, LAYOUTS) for salt, some in names.items()}
    assert found == {"bob": [0, 1, 2, 3], "alice": [2, 3], "nobody": []}


def test_what_is_deleted_is_gone_for_all_and_told(
    adapter: StoreL2Adapter, other: StoreL2Adapter, level1: Level1, heard: Heard
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    until(lambda: look_up(other, KEYS, LAYOUTS) == ALL, "the owner's announcements")
    other.submit_unlock(KEYS)
    adapter.delete([*KEYS[:2], key(99)])
    assert list(heard.sizes) == KEYS[2:]
    assert look_up(adapter, KEYS, LAYOUTS) == [2, 3, 4]
    until(lambda: look_up(other, KEYS, LAYOUTS) == [2, 3, 4], "the owner's announcements")


def test_another_servers_objects_are_not_deleted(
    adapter: StoreL2Adapter,
    other: StoreL2Adapter,
    level1: Level1,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    with caplog.at_level(logging.INFO):
        other.delete(KEYS)
    assert f"{N} of {N} objects are not deleted: this server has not stored them" in caplog.text
    assert look_up(adapter, KEYS, LAYOUTS) == ALL


def test_what_an_owner_may_have_kept_counts_until_it_is_gone(
    adapter: StoreL2Adapter, level1: Level1, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(books, "SETTLED_S", -1.0)
    store(adapter, KEYS, level1.objects(N, seed=1))
    with monkeypatch.context() as silent:
        silent.setattr(Store, "remove", lambda *_: [Removed.UNREACHABLE] * N)
        adapter.delete(KEYS)
    assert adapter.get_usage().total_bytes_used == N * NBYTES
    adapter._store.clear(adapter._books.specs(KEYS)[KEYS[0]].signature)
    assert adapter.get_usage().total_bytes_used == 0
    assert not heard.sizes


def test_what_the_store_evicts_counts_no_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 MiB go through 4 MiB of memory."""
    monkeypatch.setattr(books, "SETTLED_S", -1.0)
    level1, heard = Level1(MIB), Heard()
    small = StoreL2Adapter(config(directory, 4 * MIB), l1_memory_desc=level1.desc)
    small.register_listener(heard)
    try:
        for batch in range(12):
            names = [key(100 * batch + one) for one in range(16)]
            objects = level1.objects(16, 0, batch + 1, (64 << 10,), torch.uint8)
            assert store(small, names, objects).is_successful()
        used = small.get_usage()
        assert used.total_bytes_used == sum(heard.sizes.values()) <= 4 * MIB
        assert used.bytes_by_cache_salt == {"": used.total_bytes_used}
        assert len(small._books) == len(heard.sizes)
    finally:
        small.close()


def test_what_was_evicted_and_is_stored_again_counts_once(
    adapter: StoreL2Adapter, level1: Level1, heard: Heard
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    adapter._store.clear(adapter._books.specs(KEYS)[KEYS[0]].signature)
    store(adapter, KEYS, level1.objects(N, seed=1))
    assert adapter.get_usage().total_bytes_used == N * NBYTES
    assert list(heard.sizes) == KEYS


def test_what_lay_there_before_a_restart_counts_once_it_is_stored_again(
    adapter: StoreL2Adapter, other: StoreL2Adapter, level1: Level1
) -> None:
    mine = level1.objects(N, seed=1)
    store(adapter, KEYS, mine)
    until(lambda: other._store.known(keys_of_objects(KEYS)).all(), "the owner's announcements")
    assert store(other, KEYS, mine).bytes_transferred() == 0
    assert other.get_usage().total_bytes_used == N * NBYTES


# -- what is listed


def test_keys_are_listed_in_pages(adapter: StoreL2Adapter, level1: Level1) -> None:
    strangers = keys(2, model_name="other")
    store(adapter, KEYS, level1.objects(N, seed=1))
    store(adapter, strangers, level1.objects(2, seed=1))
    first = adapter.list_l2_keys(page_size=4)
    assert {one.size_bytes for one in first.entries} == {NBYTES}
    rest = adapter.list_l2_keys(page_size=4, cursor=first.next_page_token)
    assert listed(first) + listed(rest) == KEYS + strangers
    assert rest.next_page_token is None
    assert listed(adapter.list_l2_keys("other")) == strangers
    adapter.delete(KEYS[:1])
    assert listed(adapter.list_l2_keys("tiny")) == KEYS[1:]


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"cursor": "-1"}, {"cursor": "x"}], ids=str)
def test_a_page_that_cannot_be_is_refused(adapter: StoreL2Adapter, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        adapter.list_l2_keys(**wrong)


# -- what is locked


def test_what_a_look_up_has_found_is_pinned_until_it_is_unlocked(
    adapter: StoreL2Adapter, other: StoreL2Adapter, level1: Level1
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    own = adapter._store.figures
    assert look_up(adapter, [*KEYS, key(99)], LAYOUTS) == ALL
    until(lambda: look_up(other, KEYS, {}) == ALL, "the owner's announcements")
    assert adapter.report_status()["locked_objects"] == N
    assert other.report_status()["locked_objects"] == 0, "it knows no signature"
    assert own().own.pinned == N
    assert look_up(adapter, KEYS[:1], {}) == [0]
    adapter.submit_unlock([*KEYS, key(99)])
    until(lambda: own().own.pinned == 1, "the look-up before the last one is unlocked")
    adapter.submit_unlock(KEYS)
    adapter.submit_unlock(KEYS)
    until(lambda: own().own.pinned == 0, "all is unlocked")
    assert adapter.report_status()["locked_objects"] == 0


def test_another_servers_pins_are_not_taken_back(
    adapter: StoreL2Adapter, other: StoreL2Adapter, level1: Level1
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    assert look_up(adapter, KEYS, LAYOUTS) == ALL
    other.submit_unlock(KEYS)
    until(lambda: look_up(other, KEYS, LAYOUTS) == ALL, "the owner's announcements")
    other.submit_unlock(KEYS)
    assert look_up(other, KEYS[:1], LAYOUTS) == [0]  # Its unlocks are a lane of their own.
    assert adapter._store.figures().own.pinned == N


def test_what_is_locked_is_not_deleted(adapter: StoreL2Adapter, level1: Level1) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    assert look_up(adapter, KEYS[:2], LAYOUTS) == [0, 1]
    adapter.delete(KEYS)
    assert load(adapter, KEYS, level1.objects(N, at=MIB // 2)) == [0, 1]
    adapter.submit_unlock(KEYS[:2])
    adapter.delete(KEYS)
    assert look_up(adapter, KEYS, LAYOUTS) == []


def test_what_is_locked_is_not_evicted(directory: Path) -> None:
    """12 MiB go through 4 MiB of memory, and none of the first object's place."""
    level1, shape = Level1(MIB), (64 << 10,)
    small = StoreL2Adapter(config(directory, 4 * MIB), l1_memory_desc=level1.desc)
    layouts = {0: layout(shape, torch.uint8)}
    try:
        assert store(small, [key(7)], level1.objects(1, 0, 1, shape, torch.uint8)).is_successful()
        assert look_up(small, [key(7)], layouts) == [0]
        for batch in range(1, 13):
            names = [key(100 * batch + one) for one in range(16)]
            store(small, names, level1.objects(16, 0, batch, shape, torch.uint8))
        assert small._store.figures().own.evicted > 0
        assert load(small, [key(7)], level1.objects(1, 0, None, shape, torch.uint8)) == [0]
    finally:
        small.close()


def test_what_cannot_be_pinned_is_found_nevertheless(
    adapter: StoreL2Adapter, level1: Level1
) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    adapter._lookups._locks._max = 2
    assert look_up(adapter, KEYS, LAYOUTS) == ALL
    assert adapter.report_status()["locked_objects"] == 2
