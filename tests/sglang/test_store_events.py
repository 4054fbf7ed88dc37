# SPDX-License-Identifier: Apache-2.0
"""What `sglang-mooncake store-events` publishes, as SGLang's own subscriber takes it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from store_makers import keys, until

from sglang_mooncake.router.publishing import Publisher
from sglang_mooncake.router.store_events import StoreEvents
from sglang_mooncake.router.store_events_options import StoreEventsOptions

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,  # SGLang takes 6 s of processor time to import.
    pytest.mark.timeout(300),
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]
OPTIONS = StoreEventsOptions(
    store="{}",
    secret_file=None,
    page_size=64,
    endpoint="tcp://127.0.0.1:0",
    replay_endpoint="tcp://127.0.0.1:0",
    topic="store",
    batches=10,
)
PAGES = keys(3)
NAMES = [str(int.from_bytes(bytes(one[:8]), "big", signed=True)) for one in PAGES]


@pytest.fixture
def kv_events() -> Any:
    """SGLang's own module."""
    from sglang.srt.disaggregation import kv_events

    if kv_events.KVCacheEvent.__struct_config__.array_like:
        pytest.skip("before SGLang 0.5.20 events were arrays")
    return kv_events


class Master:
    """What SGLang's subscriber tells of each event: names of pages, as text."""

    def __init__(self) -> None:
        self.pages: set[str] = set()

    def report_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        self.pages |= set(hashes)
        return tier == "DRAM"

    def revoke_external_kv_blocks(self, hashes: list[str], tier: str) -> bool:
        self.pages -= set(hashes)
        return tier == "DRAM"


@pytest.mark.usefixtures("kv_events")
def test_sglangs_subscriber_takes_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.storage.umbp.umbp_store import KVEventsSubscriber

    mori, told = ModuleType("mori"), ModuleType("mori.umbp")
    told.UMBPTierType = SimpleNamespace(HBM="HBM", DRAM="DRAM")  # type: ignore[attr-defined]
    mori.umbp = told  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mori", mori)
    monkeypatch.setitem(sys.modules, "mori.umbp", told)
    events, master = StoreEvents(OPTIONS.page_size, OPTIONS.batches), Master()
    with Publisher(events, OPTIONS) as publisher:
        subscriber = KVEventsSubscriber(master, publisher.endpoints[0], "store", dp_rank=0)
        subscriber.start()

        def first_two() -> bool:
            """What is published before a subscriber has come goes by it: so it is told again."""
            publisher.publish(events.batches(PAGES[:0], 1.5))
            publisher.publish(events.batches(PAGES[:2], 1.5))
            return master.pages == set(NAMES[:2])

        try:
            until(first_two)
            publisher.publish(events.batches(PAGES[1:], 2.5))
            until(lambda: master.pages == set(NAMES[1:]))
        finally:
            subscriber.stop()


def test_sglangs_own_encoding_says_the_same(kv_events: Any) -> None:
    events = StoreEvents(OPTIONS.page_size, OPTIONS.batches)
    cleared, one = events.batches(PAGES[:1], 1.5)
    (two,) = events.batches(PAGES[:0], 2.5)
    medium, page = kv_events.StorageMedium.EXTERNAL.value, int(NAMES[0])
    expected = [
        kv_events.KVEventBatch(1.5, [kv_events.AllBlocksCleared()], 0),
        kv_events.KVEventBatch(1.5, [kv_events.BlockStored([page], None, [], 64, None, medium)], 0),
        kv_events.KVEventBatch(2.5, [kv_events.BlockRemoved([page], medium)], 0),
    ]
    for (_, payload), theirs in zip((cleared, one, two), expected, strict=True):
        assert msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch) == theirs
        assert msgspec.msgpack.decode(payload) == msgspec.msgpack.decode(
            msgspec.msgpack.encode(theirs)
        )
