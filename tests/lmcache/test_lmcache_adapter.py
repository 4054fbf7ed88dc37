# SPDX-License-Identifier: Apache-2.0
"""LMCache's objects in the store: what was stored comes back, and all else is told as not there."""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache_makers import (
    MIB,
    SHAPE,
    TIMEOUT_S,
    Level1,
    config,
    is_readable,
    key,
    keys,
    layout,
    load,
    look_up,
    store,
    told,
)
from store_host import end_all, pids
from store_makers import until

import te
from bootstrap_server.admission.secret_file import write_secret_file
from kvstore.lmcache.adapter import StoreL2Adapter, StoreL2AdapterConfig
from kvstore.objects.outcomes import Put
from kvstore.store import StillLanding, Store
from te.transports.registry import WITHOUT_DEVICES

N = 5
NBYTES = layout().shapes[0].numel() * 2
KEYS = keys(N)
ALL = list(range(N))


class Heard:
    """LMCache's listener."""

    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []

    def on_l2_keys_stored(self, names: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(names, sizes, strict=True)

    def on_l2_keys_accessed(self, names: list[ObjectKey]) -> None:
        self.accessed += names


# -- what was stored comes back


def test_objects_come_back_into_other_memory(adapter: StoreL2Adapter, level1: Level1) -> None:
    mine = level1.objects(N, seed=1)
    stored = store(adapter, KEYS, mine)
    assert stored.is_successful()
    assert stored.bytes_transferred() == N * NBYTES
    assert look_up(adapter, KEYS, {0: layout()}) == ALL
    back = level1.objects(N, at=MIB // 2)
    assert load(adapter, KEYS, back) == ALL
    for one, other in zip(mine, back, strict=True):
        assert torch.equal(one.raw_data, other.raw_data)
        assert one.raw_data.any()


def test_what_is_there_already_is_no_failure_and_costs_no_bytes(
    adapter: StoreL2Adapter, level1: Level1
) -> None:
    heard = Heard()
    adapter.register_listener(heard)
    mine = level1.objects(N, seed=1)
    assert store(adapter, KEYS[:2], mine[:2]).bytes_transferred() == 2 * NBYTES
    again = store(adapter, KEYS, mine)
    assert again.is_successful()
    assert again.bytes_transferred() == (N - 2) * NBYTES
    assert heard.stored == [(one, NBYTES) for one in KEYS]


def test_another_server_loads_what_one_has_stored(
    adapter: StoreL2Adapter, level1: Level1, directory: Path
) -> None:
    mine = level1.objects(N, seed=1)
    assert store(adapter, KEYS, mine).is_successful()
    elsewhere = Level1()
    other = StoreL2Adapter(config(directory, memory=0), l1_memory_desc=elsewhere.desc)
    try:
        until(lambda: look_up(other, KEYS, {0: layout()}) == ALL, "the owner's announcements")
        back = elsewhere.objects(N)
        assert load(other, KEYS, back) == ALL
        assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(mine, back, strict=True))
    finally:
        other.close()


@pytest.mark.slow
def test_a_server_that_is_started_again_loads_what_it_has_stored(directory: Path) -> None:
    """Its memory is that of the host's owner, which stays."""
    mine: list[Any] = []
    try:
        for _ in range(2):
            level1 = Level1()
            one = StoreL2Adapter(config(directory), l1_memory_desc=level1.desc)
            try:
                if not mine:
                    mine = level1.objects(N, seed=1)
                    assert store(one, KEYS, mine).is_successful()
                    continue
                until(lambda one=one: look_up(one, KEYS, {0: layout()}) == ALL, "what it knows")
                back = level1.objects(N)
                assert load(one, KEYS, back) == ALL
                assert all(
                    torch.equal(a.raw_data, b.raw_data) for a, b in zip(mine, back, strict=True)
                )
            finally:
                one.close()
        assert len(pids(directory)) == 1
    finally:
        end_all(directory)


def test_objects_of_several_layouts_in_one_task(adapter: StoreL2Adapter, level1: Level1) -> None:
    shape, dtype = (3, 16, 5), torch.float32
    small = [key(one, object_group_id=1) for one in range(N)]
    names = [one for pair in zip(KEYS, small, strict=True) for one in pair]
    layouts = {0: layout(), 1: layout(shape, dtype)}

    def both(at: int, seed: int | None) -> list[Any]:
        first = level1.objects(N, at, seed)
        second = level1.objects(N, at + N * NBYTES, seed, shape, dtype)
        return [one for pair in zip(first, second, strict=True) for one in pair]

    mine, back = both(0, 3), both(MIB // 2, None)
    assert store(adapter, names, mine).is_successful()
    assert look_up(adapter, [*names, key(99)], layouts) == list(range(2 * N))
    assert load(adapter, names, back) == list(range(2 * N))
    assert all(torch.equal(a.raw_data, b.raw_data) for a, b in zip(mine, back, strict=True))


@pytest.mark.filterwarnings("ignore")  # LMCache imports its own adapters
def test_lmcache_makes_it_from_a_command_line(directory: Path, level1: Level1) -> None:
    spec = {
        "type": "plugin",
        "module_path": "kvstore.lmcache.adapter",
        "class_name": "StoreL2Adapter",
        "adapter_params": {
            "memory": "8MiB",
            "directory": str(directory),
            "timeout_s": int(TIMEOUT_S),
            "request_timeout_s": int(TIMEOUT_S),
        },
    }

    (given,) = parse_args_to_l2_adapters_config(
        argparse.Namespace(l2_adapter=[json.dumps(spec)])
    ).adapters
    made = create_l2_adapter(given, l1_memory_desc=level1.desc)
    try:
        assert isinstance(made, StoreL2Adapter)
        assert store(made, KEYS, level1.objects(N, seed=1)).is_successful()
    finally:
        made.close()


def test_the_event_fds_differ_and_tell_of_their_own_tasks(
    adapter: StoreL2Adapter, level1: Level1
) -> None:
    fds = (
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    )
    assert len(set(fds)) == 3
    store(adapter, KEYS, level1.objects(N, seed=1))
    assert [is_readable(one) for one in fds] == [False] * 3
    adapter.submit_lookup_and_lock_task(KEYS, {})
    until(lambda: is_readable(fds[1]), "the look-up ends")
    assert [is_readable(one) for one in fds] == [False, True, False]


# -- what is not there


def test_what_nobody_has_stored_is_neither_found_nor_loaded(
    adapter: StoreL2Adapter, level1: Level1
) -> None:
    heard = Heard()
    adapter.register_listener(heard)
    assert store(adapter, KEYS[::2], level1.objects(3, seed=1)).is_successful()
    assert look_up(adapter, KEYS, {0: layout()}) == [0, 2, 4]
    assert look_up(adapter, KEYS, {}) == [0, 2, 4]
    assert load(adapter, KEYS, level1.objects(N, at=MIB // 2)) == [0, 2, 4]
    assert heard.accessed == KEYS[::2]


@pytest.mark.parametrize(
    "other",
    [
        layout((2, 3, 32, 8)),
        layout((2, 3, 8, 8)),
        layout((2, 3, 8, 16)),
        layout(dtype=torch.float16),
        layout(dtype=torch.float32),
    ],
    ids=str,
)
def test_another_size_shape_or_type_is_never_a_hit(
    adapter: StoreL2Adapter, level1: Level1, other: MemoryLayoutDesc
) -> None:
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert look_up(adapter, KEYS, {0: other}) == []
    wrong = level1.objects(N, MIB // 2, None, other.shapes[0], other.dtypes[0])
    assert load(adapter, KEYS, wrong) == []
    assert not any(one.raw_data.any() for one in wrong), "nothing is read into it"
    status = adapter.report_status()
    assert status["gets"] == {"rejected": N}
    assert status["lookups"]["rejected"] == N


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "large"},
        {"cache_salt": "else"},
        {"kv_rank": ObjectKey.ComputeKVRank(4, 1, 4, 1)},
    ],
    ids=str,
)
def test_another_model_salt_or_world_size_is_never_a_hit(
    adapter: StoreL2Adapter, level1: Level1, other: dict[str, Any]
) -> None:
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert look_up(adapter, keys(N, **other), {0: layout()}) == []
    assert load(adapter, keys(N, **other), level1.objects(N, at=MIB // 2)) == []


def test_other_weights_of_one_model_name_are_never_a_hit(
    adapter: StoreL2Adapter, level1: Level1, directory: Path
) -> None:
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    elsewhere = Level1()
    other = StoreL2Adapter(config(directory, 0, weights="step 2"), l1_memory_desc=elsewhere.desc)
    try:
        until(lambda: look_up(other, KEYS, {}) == ALL, "the owner's announcements")
        assert look_up(other, KEYS, {0: layout()}) == []
        assert load(other, KEYS, elsewhere.objects(N)) == []
    finally:
        other.close()


def test_without_a_layout_a_look_up_finds_any_size_and_the_load_tells(
    adapter: StoreL2Adapter, level1: Level1
) -> None:
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert look_up(adapter, KEYS, {0: MemoryLayoutDesc([], [])}) == ALL
    assert look_up(adapter, KEYS, {1: layout()}) == ALL
    assert load(adapter, KEYS, level1.objects(N, MIB // 2, None, (2, 3, 8, 8))) == []


# -- what fails


def test_memory_that_is_not_lmcaches_first_level_fails_the_task(
    adapter: StoreL2Adapter, level1: Level1, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Level1()
    assert not store(adapter, KEYS, foreign.objects(N, seed=1)).is_successful()
    assert "a store failed" in caplog.text
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert load(adapter, KEYS, foreign.objects(N)) == []
    assert "a load failed" in caplog.text


def test_more_keys_than_objects_fail_the_task(adapter: StoreL2Adapter, level1: Level1) -> None:
    assert not store(adapter, KEYS, level1.objects(N - 1, seed=1)).is_successful()
    assert load(adapter, KEYS, level1.objects(N - 1)) == []


def test_a_look_up_that_fails_finds_nothing(
    adapter: StoreL2Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    wrong: Any = MemoryLayoutDesc([torch.Size(SHAPE)], ["no type"])
    assert look_up(adapter, KEYS, {0: wrong}) == []
    assert "a look-up failed" in caplog.text


def test_one_object_that_is_not_stored_fails_the_task(
    adapter: StoreL2Adapter, level1: Level1, caplog: pytest.LogCaptureFixture
) -> None:
    """Larger than a chunk of the store's memory, which is 1 MiB."""
    big = Level1(4 * MIB)
    adapter._store.register(big.bytes.numpy())
    objects = [*level1.objects(1, seed=1), *big.objects(1, 0, 1, (MIB + 1,), torch.uint8)]
    result = store(adapter, KEYS[:2], objects)
    assert not result.is_successful()
    assert "'too large': 1" in caplog.text
    assert look_up(adapter, KEYS[:2], {}) == [0]


def test_without_anybody_who_lends_memory_a_store_fails(directory: Path, level1: Level1) -> None:
    alone = StoreL2Adapter(config(directory, memory=0), l1_memory_desc=level1.desc)
    try:
        assert not store(alone, KEYS, level1.objects(N, seed=1)).is_successful()
        status = alone.report_status()
        assert not status["is_healthy"]
        assert status["reason"] == "no process lends memory to the store"
    finally:
        alone.close()


def through(adapter: StoreL2Adapter, level1: Level1) -> list[ObjectKey]:
    """Stores 12 MiB in batches that are larger than what the owner keeps free; the last one."""
    for batch in range(12):
        names = [key(100 * batch + one) for one in range(16)]
        mine = level1.objects(16, 0, batch + 1, (64 << 10,), torch.uint8)
        assert store(adapter, names, mine).is_successful()
    return names


def test_a_batch_is_stored_at_once_as_older_objects_are_evicted(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    level1 = Level1(4 * MIB)
    small = StoreL2Adapter(config(directory, 4 * MIB), l1_memory_desc=level1.desc)
    try:
        names = through(small, level1)
        assert small.report_status()["puts"] == {"stored": 12 * 16}
        assert small._store.figures().own.evicted > 0
        back = level1.objects(16, 2 * MIB, None, (64 << 10,), torch.uint8)
        assert load(small, names, back) == list(range(16))
    finally:
        small.close()
    assert "were not stored" not in caplog.text


def test_a_batch_that_finds_no_slots_is_stored_while_others_are_written_to_a_disk(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The thread that writes may stand still for seconds.
    monkeypatch.setattr("kvstore.lmcache.adapter.VAIN_TRIES_MAX", 1_000_000)
    level1 = Level1(4 * MIB)
    disk = {"disk": str(directory / "disk"), "disk_size": 64 * MIB}
    small = StoreL2Adapter(config(directory, 4 * MIB, **disk), l1_memory_desc=level1.desc)
    try:
        names = through(small, level1)
        assert small.report_status()["puts"]["no space"] > 0, "some have waited"
        back = level1.objects(16, 2 * MIB, None, (64 << 10,), torch.uint8)
        assert load(small, names, back)
    finally:
        small.close()
    assert "were not stored" not in caplog.text


def test_without_room_a_store_fails_soon(
    adapter: StoreL2Adapter, level1: Level1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds LMCache's objects until then."""
    tries = []

    def full(self: Store, digests: Any, *more: Any) -> list[Put]:
        tries.append(len(digests))
        return [Put.NO_SPACE] * len(digests)

    monkeypatch.setattr(Store, "put", full)
    assert not store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert tries == [N] * 10


def test_closing_ends_the_tries_to_store(
    adapter: StoreL2Adapter, level1: Level1, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def full(self: Store, digests: Any, *more: Any) -> list[Put]:
        tried.set()
        return [Put.NO_SPACE] * len(digests)

    monkeypatch.setattr(Store, "put", full)
    monkeypatch.setattr("kvstore.lmcache.adapter.AGAIN_S", 2 * TIMEOUT_S)
    adapter._timeout_s = 2 * TIMEOUT_S
    adapter.submit_store_task(KEYS, level1.objects(N, seed=1))
    assert tried.wait(TIMEOUT_S)
    closing = threading.Thread(target=adapter.close)
    closing.start()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_task_has_a_deadline(
    adapter: StoreL2Adapter, level1: Level1, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    put, get = Store.put, Store.get

    def timed(call: Any) -> Any:
        def timed_call(*arguments: Any) -> Any:
            given.append(arguments[-1])
            return call(*arguments)

        return timed_call

    monkeypatch.setattr(Store, "put", timed(put))
    monkeypatch.setattr(Store, "get", timed(get))
    store(adapter, KEYS, level1.objects(N, seed=1))
    load(adapter, KEYS, level1.objects(N))
    assert len(given) == 2
    assert all(0 < one <= adapter._timeout_s for one in given)


def test_a_load_that_does_not_stop_is_told_once_nothing_lands_any_more(
    adapter: StoreL2Adapter, level1: Level1, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache would use the memory again."""
    waits, landed = threading.Event(), threading.Event()

    class Landing(StillLanding):
        def wait(self, *_: object) -> None:
            waits.set()
            assert landed.wait(TIMEOUT_S)

    def late(*_: Any) -> None:
        raise Landing([])

    monkeypatch.setattr(Store, "get", late)
    task = adapter.submit_load_task(KEYS, level1.objects(N))
    assert waits.wait(TIMEOUT_S)
    assert adapter.query_load_result(task) is None
    landed.set()
    # A bitmap without a bit is false.
    (found,) = told(
        adapter.get_load_event_fd(),
        lambda: None if (one := adapter.query_load_result(task)) is None else [one],
    )
    assert found.get_indices_list() == []
    assert adapter.report_status()["is_healthy"]


def test_a_listener_that_raises_changes_no_result(
    adapter: StoreL2Adapter, level1: Level1, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        """Has none of a listener's methods."""

    adapter.register_listener(Broken())  # type: ignore[arg-type]
    assert store(adapter, KEYS, level1.objects(N, seed=1)).is_successful()
    assert load(adapter, KEYS, level1.objects(N, at=MIB // 2)) == ALL
    assert caplog.text.count("a listener of LMCache failed") == 2


# -- how it is, and the end


def test_how_it_is(adapter: StoreL2Adapter, level1: Level1) -> None:
    store(adapter, KEYS, level1.objects(N, seed=1))
    status = adapter.report_status()
    assert status["is_healthy"], status
    assert status["memory_bytes"] == 8 * MIB
    assert status["known_objects"] == N
    assert status["puts"] == {"stored": N}
    assert status["own_objects"] == N
    usage = adapter.get_usage()
    assert (usage.total_bytes_used, usage.total_capacity_bytes) == (N * NBYTES, 8 * MIB)


def test_closing_gives_all_back(adapter: StoreL2Adapter, level1: Level1) -> None:
    fds = (
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    )
    threads = {one.name for one in threading.enumerate()}
    assert {"store-store", "store-load"} <= threads
    store(adapter, KEYS, level1.objects(N, seed=1))
    adapter.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    assert not {"store-store", "store-load"} & {one.name for one in threading.enumerate()}
    adapter.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memroy": 1}, "did you mean 'memory'"),
        ({"timeout_s": 0}, "timeout_s=0 must be a positive number"),
        ({"timeout_s": float("inf")}, "timeout_s=inf must be a positive number"),
        ({"index": "redis://localhost"}, "index needs a secret"),
        ({"ports": 20000}, "ports=20000 must be a text"),
        ({"port": "20000-20010"}, "did you mean 'ports'"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        StoreL2AdapterConfig.from_dict(given)


def test_devices_are_used_between_hosts_alone(directory: Path) -> None:
    assert config(directory).store.engine.transports == WITHOUT_DEVICES
    secret = directory / "secret"
    write_secret_file(secret)
    several = config(directory, index="redis://localhost", secret_file=str(secret))
    assert several.store.engine.transports == te.Config().transports
    assert several.store.keys


def test_how_others_reach_the_memory(directory: Path) -> None:
    given = config(directory, transports="tcp", nics="mlx5_*", ports="20000-20010").store.engine
    assert (given.transports, given.nics) == (("tcp",), ("mlx5_*",))
    assert (given.port, given.port_last) == (20000, 20010)


def test_the_settings_are_listed_for_lmcache() -> None:
    for name in ("memory", "weights", "timeout_s", "index"):
        assert f"- {name}" in StoreL2AdapterConfig.help()


@pytest.mark.parametrize("desc", [None, "empty"])
def test_without_lmcaches_memory_there_is_no_adapter(directory: Path, desc: Any) -> None:
    if desc:
        desc = type(Level1().desc)(ptr=4096, size=0, align_bytes=1)
    with pytest.raises(ValueError, match="must be one range"):
        StoreL2Adapter(config(directory), l1_memory_desc=desc)
