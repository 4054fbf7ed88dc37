# SPDX-License-Identifier: Apache-2.0
"""``mooncake.store`` over kvstore: what its calls do and return."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from store_host import store_directory

import te
from kvstore.config import Config
from kvstore.store import StillLanding, Store
from sglang_mooncake.faces.mooncake_store import Options, install
from sglang_mooncake.faces.mooncake_store import impl as impl_module
from sglang_mooncake.faces.mooncake_store import objects as objects_module
from sglang_mooncake.faces.mooncake_store.names import ReplicateConfig, SoftPinAction
from sglang_mooncake.faces.mooncake_store.settings import Setup
from sglang_mooncake.faces.mooncake_store.store import MooncakeDistributedStore

ROOT = Path(__file__).parents[3]
NEVER_S = 1_000.0
MEMORY, BUFFER = 16 << 20, 1 << 20


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No deadline passes on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impl_module, "SETTLE_TIMEOUT_S", NEVER_S)
        patch.setattr(objects_module, "TIMEOUT_S", NEVER_S)
        yield


def store_of(directory: Path, **more: object) -> MooncakeDistributedStore:
    """One that was not set up."""

    def open_store(setup: Setup) -> Store:
        engine = te.Config(status_dir=None, connect_timeout_s=NEVER_S, stall_timeout_s=NEVER_S)
        given = {"memory": setup.segment_bytes, "request_timeout_s": NEVER_S} | more
        return Store(Config(directory=directory, engine=engine, **given))

    name = MooncakeDistributedStore.__name__
    return type(name, (MooncakeDistributedStore,), {"options": Options(open_store)})()


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


@pytest.fixture(scope="module")
def lender(directory: Path) -> Iterator[MooncakeDistributedStore]:
    store = store_of(directory)
    assert store.setup("h", "P2PHANDSHAKE", MEMORY, BUFFER, "tcp", "", "m:1") == 0
    yield store
    store.close()


@pytest.fixture
def store(lender: MooncakeDistributedStore) -> Iterator[MooncakeDistributedStore]:
    """With nothing in it."""
    yield lender
    lender.remove_all()
    assert lender.unregister_buffer(1) == -600


class Room:
    """Registered memory."""

    def __init__(self, store: MooncakeDistributedStore, nbytes: int = 4096) -> None:
        self.bytes = np.zeros(nbytes, np.uint8)
        self.at = int(self.bytes.ctypes.data)
        self._store = store

    def __enter__(self) -> Self:
        assert self._store.register_buffer(self.at, len(self.bytes)) == 0
        return self

    def __exit__(self, *_: object) -> None:
        assert self._store.unregister_buffer(self.at) == 0

    def read(self, first: int, count: int) -> bytes:
        return self.bytes[first : first + count].tobytes()


def test_before_setup_and_after_close_each_call_fails_and_says_so(tmp_path, caplog) -> None:
    store = store_of(tmp_path)
    for _ in range(2):
        assert store.put("k", b"v") == store.register_buffer(1, 1) == store.get_size("k") == -600
        assert store.batch_put_from(["a", "b"], [1, 2], [1, 1]) == [-600, -600]
        assert store.batch_get_session_start(["a"]) == [-600]
        assert (store.is_exist("k"), store.get("k"), store.get_buffer("k")) == (-1, b"", None)
        assert store.get_into_ranges([1], [["k"]], [[[0, 1]]], [[[0]]], [[[1]]]) == [[[-600] * 2]]
        assert (store.health_check(), store.get_hostname()) == (1, "")
        assert store.batch_get_replica_desc(["k"]) == {}
        assert store.close() == 0
    assert "was not set up, or was closed" in caplog.text


def test_what_setup_refuses_is_a_number_and_a_sentence(tmp_path, caplog) -> None:
    store = store_of(tmp_path)
    assert store.setup("h", "s", "50%", 0, "tcp", "", "m") == -600
    assert "'50%' is no size" in caplog.text
    assert store.setup("h", "s", 0, 0, "warp", "", "m") == -600
    assert store.setup({"metadata_server": "s"}) == -600
    assert "setup needs local_hostname" in caplog.text
    assert store.setup("h", "s", 0, 0, enable_ssd_offload=True) == -600
    assert "among the store's own settings" in caplog.text
    with pytest.raises(TypeError, match="no_such_argument"):
        store.setup("h", "s", no_such_argument=1)
    assert store.health_check() == 1


def test_it_is_set_up_once(lender, caplog) -> None:
    assert lender.setup("h", "s", 0, 0, "tcp", "", "m:1") == -600
    assert "set up before" in caplog.text
    assert lender.health_check() == 0
    host, port = lender.get_hostname().split(":")
    assert host == "h"
    assert 12300 <= int(port) <= 14300


def test_bytes_of_python_come_back_and_the_first_value_stays(store) -> None:
    assert store.put("k", b"hello") == 0
    assert (store.is_exist("k"), store.get_size("k"), store.get("k")) == (1, 5, b"hello")
    assert store.put("k", b"other") == 0
    assert store.put_parts("parts", b"one ", memoryview(b"two"), bytearray(b"")) == 0
    assert store.put_batch(["a", "b"], [b"A" * 9, b"B"]) == 0
    assert store.get_batch(["k", "parts", "a", "none"]) == [b"hello", b"one two", b"A" * 9, b""]
    assert store.get_size("none") == -704
    handle, missing = store.batch_get_buffer(["parts", "none"])
    assert (bytes(handle), handle.size(), len(handle), missing) == (b"one two", 7, 7, None)
    address = handle.ptr()
    assert address == np.frombuffer(handle, np.uint8).ctypes.data


def test_memory_that_could_not_be_unregistered_still_is_and_can_be(store, monkeypatch) -> None:
    real = Store.deregister
    with Room(store) as room:

        def refuses(self: Store, region: te.Region) -> None:
            raise te.RegistrationError(f"1 unfinished transfers read from the region {region}")

        monkeypatch.setattr(Store, "deregister", refuses)
        assert store.unregister_buffer(room.at) != 0
        monkeypatch.setattr(Store, "deregister", real)
        room.bytes[:] = 7
        assert store.put_from("k", room.at, 8) == 0
    assert store.get("k") == bytes([7] * 8)


def test_what_put_refuses(store, caplog) -> None:
    assert store.put("", b"v") == store.put("k", b"") == -600
    assert store.put("k", bytes(BUFFER + 1)) == -600
    assert "local_buffer_size" in caplog.text
    assert store.put_batch(["a", "b"], [b"v"]) == -600
    assert store.put_batch(["a", "b"], [b"v", b""]) == -600
    unregistered = np.ones(8, np.uint8)
    assert store.put_from("k", int(unregistered.ctypes.data), 8) == -600
    assert store.is_exist("k") == 0


def test_an_upsert_replaces(store) -> None:
    assert store.upsert("k", b"one") == store.upsert("k", b"second") == 0
    assert store.upsert_parts("p", b"a", b"b") == store.upsert_batch(["q"], [b"q"]) == 0
    assert store.get_batch(["k", "p", "q"]) == [b"second", b"ab", b"q"]


def test_a_config_is_checked_and_counts_for_nothing(store) -> None:
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert store.put("k", b"v", config) == 0
    assert store.put("k", b"v", config=config) == 0
    with Room(store) as room:
        given = (["a", "b"], [room.at] * 2, [8, 8], config)
        assert store.batch_put_from(*given) == store.batch_upsert_from(*given) == [-600, -600]
    config.group_ids = None
    config.soft_pin_ttl_ms = 5
    assert store.put("x", b"v", config) == -600
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("x", b"v", config) == 0
    with pytest.raises(TypeError):
        config.soft_pin_ttl_ms = -1
    with pytest.raises(AttributeError, match="session_ids"):
        config.session_ids = []
    assert "replica_num=1" in str(config)


def test_registered_memory_is_stored_and_filled(store) -> None:
    with Room(store) as room:
        room.bytes[:300] = np.arange(300) % 251
        whole = room.read(0, 300)
        assert store.register_buffer(room.at + 8, 16) == -600
        pointers, sizes = [[room.at, room.at + 200], [room.at]], [[200, 100], [300]]
        assert store.batch_put_from_multi_buffers(["split", "one"], pointers, sizes) == [0, 0]
        # Another cut, a larger room, a smaller one, and nothing.
        pointers = [[room.at + 1000], [room.at + 2000, room.at + 2500], [room.at], [room.at]]
        sizes = [[300], [10, 1000], [299], [300]]
        keys = ["split", "one", "one", "none"]
        assert store.batch_get_into_multi_buffers(keys, pointers, sizes) == [300, 300, -600, -704]
        assert room.read(1000, 300) == whole
        assert room.read(2000, 10) + room.read(2500, 290) == whole
        assert not any(room.read(2790, 1000))
        assert store.get_into("one", room.at + 3000, 300) == 300
        assert room.read(3000, 300) == whole
        for lists in ([[room.at]], [[300], [300], [300]]):
            assert store.batch_get_into_multi_buffers(keys[:2], lists, lists) == [-600, -600]
        assert store.batch_get_into([], [], []) == []


def test_large_objects_are_stored_in_parts_and_lack_none(store, monkeypatch) -> None:
    monkeypatch.setattr(objects_module, "PART_BYTES", 1000)
    objects = store._impl.objects
    monkeypatch.setattr(objects._large, "_part_bytes", 1000)
    data = np.random.default_rng(5).bytes(2500)
    assert store.put("large", data) == store.put("small", data[:1000]) == 0
    assert (store.get_size("large"), store.get("large"), store.is_exist("large")) == (2500, data, 1)
    with Room(store) as room:
        assert store.get_into("large", room.at, 4096) == 2500
        assert room.read(0, 2500) == data
        assert store.batch_get_session_start(["large"]) == [0]
        read = store.batch_get_into_multi_buffer_ranges
        assert read(["large"], [[room.at, room.at + 5]], [[5, 5]], [[998, 1003]]) == [10]
        assert room.read(0, 10) == data[998:1008]
        assert store.batch_get_session_end(["large"]) == 0
    assert store.remove("large") == 0
    assert store.remove("large") == -704
    assert store.put("large", data) == 0
    assert store.remove_all() == 2
    # Without a part it is no object, and so can be stored again.
    assert store.put("large", data) == 0
    objects._store.clear(objects._parts)
    assert store.get("large") == b""
    assert store.is_exist("large") == 0
    assert store.put("large", data) == 0
    assert store.get("large") == data


def test_ranges_of_several_objects_go_into_buffers(store) -> None:
    store.put("a", b"0123456789")
    store.put("b", b"abcdefghij")
    with Room(store, 32) as one, Room(store, 32) as other:
        assert store.get_into_ranges(
            [one.at, other.at],
            [["a", "b", "none"], ["b"]],
            [[[20, 0], [8], [0]], [[0]]],
            [[[1, 7], [2], [0]], [[4]]],
            [[[4, 3], [5], [1]], [[6]]],
        ) == [[[4, 3], [5], [-704]], [[6]]]
        assert (one.read(20, 4), one.read(0, 3), one.read(8, 5)) == (b"1234", b"789", b"cdefg")
        assert other.read(0, 6) == b"efghij"
        # Beyond the object, beyond the buffer, none at all, lists that do not fit.
        wrong = store.get_into_ranges(
            [one.at], [["a"]], [[[0, 30, 0, 0]]], [[[8, 0, 0, -1]]], [[[3, 3, 0, 1]]]
        )
        assert wrong == [[[-600] * 4]]
        assert store.get_into_ranges([one.at], [["a"]], [[[0, 1]]], [[[0]]], [[[1]]]) == [
            [[-600, -600]]
        ]
        assert store.get_into_ranges([one.at], [["a"]], [[[0]]], [[]], [[[1]]]) == [[[-600]]]
        assert store.get_into_ranges([one.at], [], [[[0]]], [], []) == [[[-600]]]


def test_a_session_reads_parts_and_keeps_them_meanwhile(store) -> None:
    data = {name: np.random.default_rng(i).bytes(1000) for i, name in enumerate("abc")}
    store.put_batch(list(data), list(data.values()))
    names = [*data, "none"]
    assert store.batch_get_session_start(names) == [0, 0, 0, -704]
    assert store.batch_get_session_start(["a"]) == [0]
    sessions = store._impl.sessions
    assert (len(sessions), sessions._open["a"].pins) == (3, 2)
    read = store.batch_get_into_multi_buffer_ranges
    with Room(store) as room:
        pointers = [[room.at + 100 * i, room.at + 100 * i + 50] for i in range(4)]
        came = read(names, pointers, [[50, 50]] * 4, [[10, 60], [10, 500], [10, 960], [0, 50]])
        assert came == [100, 100, -600, -600]
        assert room.read(0, 100) == data["a"][10:110]
        assert room.read(100, 100) == data["b"][10:60] + data["b"][500:550]
        assert read(["a"], [], [], []) == [-600]
        assert read(["a"], [[room.at]], [[1, 2]], [[0]]) == [-600]
        store.remove("b")
        assert read(["b"], [[room.at]], [[1]], [[0]]) == [-704]
    for left in (2, 1, 0):
        assert store.batch_get_session_end(["a", "b", "none"] if left == 2 else ["a", "c"]) == 0
        if left == 2:
            assert sessions._open["a"].pins == 1
    assert len(sessions) == 0


def test_what_is_removed_is_gone(store) -> None:
    store.put_batch(["a", "b", "c"], [b"1", b"2", b"3"])
    assert store.batch_remove(["a", "none"]) == [0, -704]
    assert store.batch_is_exist(["a", "b"]) == [0, 1]
    assert store.remove_by_regex(".*") == -600
    assert store.remove_all(force=True) == 2
    assert store.remove("b", force=True) == -704


def test_who_names_another_master_or_tenant_shares_nothing(store, directory) -> None:
    store.put("k", b"mine")
    others = [({"master_server_address": "m:2"}, 0, b""), ({"tenant_id": "t"}, 0, b"")]
    others.append(({"master_server_addr": "m:1"}, 1, b"mine"))
    for given, exists, value in others:
        other = store_of(directory)
        base = {"local_hostname": "o:7", "metadata_server": "s", "global_segment_size": "0"}
        base["master_server_address"] = "m:1"
        if "master_server_addr" in given:
            del base["master_server_address"]
        assert other.setup(base | given) == 0
        assert (other.is_exist("k"), other.get("k")) == (exists, value)
        assert other.get_hostname() == "o:7"
        assert other.close() == 0


def test_setup_waits_for_what_others_have(lender, directory, monkeypatch) -> None:
    asked, knows = threading.Event(), threading.Event()

    def knows_all(_: Store) -> bool:
        asked.set()
        return knows.is_set()

    lender.put("k", b"theirs")
    monkeypatch.setattr(Store, "knows_all", property(knows_all))
    store = store_of(directory)
    given = ("o", "s", 0, BUFFER, "tcp", "", "m:1")
    with ThreadPoolExecutor() as threads:
        result = threads.submit(store.setup, *given)
        try:
            assert asked.wait(60)
            assert not result.done()
        finally:
            knows.set()
        assert result.result() == 0
    assert store.get("k") == b"theirs"
    store.close()
    lender.remove("k")


def test_one_that_does_not_answer_holds_setup_up_for_a_while(
    lender, directory, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(impl_module, "SETTLE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(Store, "knows_all", property(lambda _: False))
    store = store_of(directory)
    assert store.setup("o", "s", 0, BUFFER, "tcp", "", "m:1") == 0
    assert "not all processes that lend memory have answered within 0.01 s" in caplog.text
    store.close()


def test_one_that_lends_nothing_uses_what_others_lend(store, directory) -> None:
    dummy = store_of(directory)
    assert dummy.setup_dummy(1 << 30, BUFFER, "m:1") == 0
    assert dummy.put("k", b"theirs") == 0
    assert dummy.is_exist("k") == 1
    assert store.remove("k") == 0
    assert dummy.close() == 0


def test_without_anybody_who_lends_a_put_fails(tmp_path) -> None:
    with store_directory() as path:
        alone = store_of(path)
        assert alone.setup("h", "s", 0, BUFFER, "tcp", "", "m") == 0
        assert alone.put("k", b"v") == -900
        assert alone.close() == 0


def test_without_a_buffer_bytes_of_python_are_refused(directory, store, caplog) -> None:
    other = store_of(directory)
    # With an engine, as SGLang gives its own for "rdma".
    assert other.setup("h", "P2PHANDSHAKE", 0, 0, "rdma", "", "m:1", object()) == 0
    store.put("k", b"v")
    assert (other.put("x", b"v"), other.get("k"), other.is_exist("x")) == (-600, b"", 0)
    assert "do not fit into the 0 of setup's local_buffer_size" in caplog.text
    other.close()


def test_where_an_object_lies(store) -> None:
    store.put("k", b"v")
    (one,) = store.get_replica_desc("k")
    assert one.is_memory_replica()
    assert not one.is_disk_replica()
    assert not one.is_local_disk_replica()
    assert one.status.name == "COMPLETE"
    assert store.batch_get_replica_desc(["k", "none"]).keys() == {"k"}
    assert store.get_replica_desc("none") == []


ENDS = """
import sys
from sglang_mooncake.sglang.drop_in import install
install()
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("h", "P2PHANDSHAKE", 4 << 20, 1 << 20, "tcp", "", "m:1") == 0
assert store.put("of a process that ends", b"v") == 0
"""


ENDS_WITH_A_CHILD = f"""{ENDS}
import os
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.get("of a process that ends") == b"v"
"""


def ended(code: str, directory: Path, **more: object) -> None:
    """A process has run that, and nothing looked like a bug at its end."""
    given = {"directory": str(directory), "request_timeout_s": NEVER_S} | more
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "SGLANG_MOONCAKE_STORE": json.dumps(given),
        },
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stderr
    for said in ("Traceback", "a bug in", "does not unmap"):
        assert said not in done.stderr


@pytest.mark.slow
def test_a_process_that_ends_without_close_takes_its_leave(store, directory) -> None:
    ended(ENDS, directory)


@pytest.mark.slow
def test_a_forked_child_that_ends_leaves_its_parents_store_alone() -> None:
    with store_directory() as path:
        ended(ENDS_WITH_A_CHILD, path)


def test_a_get_fails_only_once_nothing_lands_any_more(store, directory, monkeypatch) -> None:
    """Whoever is told of its failure uses the memory again: the caller, or the next get of bytes,
    which waits for its room."""
    waits, has_stopped = threading.Semaphore(0), threading.Event()

    class Stuck(StillLanding):
        def wait(self, clock: object = None) -> None:
            waits.release()
            assert has_stopped.wait(60.0)

    def stuck(*_: object, **__: object) -> object:
        raise Stuck([])

    other = store_of(directory)
    assert other.setup("h", "s", 0, BUFFER, "tcp", "", "m:1") == 0
    try:
        assert other.put("k", b"value") == 0
        with Room(other) as room, ThreadPoolExecutor(5) as threads:
            assert other.batch_get_session_start(["k"]) == [0]
            monkeypatch.setattr(Store, "get", stuck)
            monkeypatch.setattr(Store, "get_range", stuck)
            gets = [
                (other.get_into, ("k", room.at, 5), -800),
                (
                    other.get_into_ranges,
                    ([room.at], [["k"]], [[[0]]], [[[1]]], [[[2]]]),
                    [[[-800]]],
                ),
                (
                    other.batch_get_into_multi_buffer_ranges,
                    (["k"], [[room.at]], [[2]], [[1]]),
                    [-800],
                ),
                (other.get, ("k",), b""),
                (other.get_buffer, ("k",), None),
            ]
            under_way = [threads.submit(get, *of) for get, of, _ in gets]
            for _ in gets:
                assert waits.acquire(timeout=60.0)
            assert not any(one.done() for one in under_way)
            assert other._impl.arena._gaps.gaps == [(2 * 64, BUFFER)], "two have room there"
            has_stopped.set()
            assert [one.result(60.0) for one in under_way] == [failed for *_, failed in gets]
            monkeypatch.undo()
            assert other._impl.arena._gaps.gaps == [(0, BUFFER)]
            assert other.get("k") == b"value"
    finally:
        has_stopped.set()
        other.close()


def test_what_it_has_not_is_said(store) -> None:
    with pytest.raises(AttributeError, match="has no put_tensor: it stores and reads bytes"):
        store.put_tensor("k", None)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """How this process imports is as before after the test."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in ("mooncake", "mooncake.store"):
        sys.modules.pop(name, None)


def test_the_module_has_the_names_that_programs_import(restored, tmp_path, caplog) -> None:
    options = Options(lambda _: pytest.fail("nothing is opened"))
    install(options)
    module = importlib.import_module("mooncake.store")
    assert module.MooncakeDistributedStore.options is options
    assert module.ReplicateConfig is ReplicateConfig
    allocator = module.MooncakeHostMemAllocator()
    address = allocator.alloc(5000)
    assert address
    assert (allocator.alloc(0), allocator.alloc(-1)) == (0, 0)
    assert (allocator.free(address), allocator.free(address)) == (0, -1)
    with pytest.raises(ImportError, match=r"'bind_to_numa_node' from 'mooncake\.store'"):
        exec("from mooncake.store import bind_to_numa_node")
    assert "it is in the mooncake package" in caplog.text
