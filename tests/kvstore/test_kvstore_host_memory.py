# SPDX-License-Identifier: Apache-2.0
"""What a host has no room for is refused before anything is taken."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_makers import config
from store_meeting import owning

from kvstore import serving
from kvstore.host import agreement
from kvstore.host.hosting import Brought
from kvstore.host.place import Place
from kvstore.memory import host_memory
from kvstore.memory.host_memory import Room, check_room, meminfo_room, rooms
from kvstore.memory.memory_file import MemoryFile
from kvstore.owner.card import OwnerCard
from kvstore.owning import OwningStore
from kvstore.serving import serve, transit_chunk_bytes

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\nSwapFree: 9 kB\n"}
V1 = "sys/fs/cgroup/memory/"


def test_the_host_alone(tmp_path: Path) -> None:
    assert [one.nbytes for one in rooms(tree(tmp_path, MEMINFO))] == [8000 << 10]


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (
            {
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/one/memory.max": "max\n",
                "sys/fs/cgroup/pods/one/memory.current": "5\n",
                "sys/fs/cgroup/pods/memory.max": "5000\n",
                "sys/fs/cgroup/pods/memory.current": "4000\n",
                "sys/fs/cgroup/pods/memory.stat": "anon 1\ninactive_file 500\n",
            },
            1500,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n2:memory,x:/of/the/host\n0::/\n",
                f"{V1}memory.limit_in_bytes": "5000\n",
                f"{V1}memory.usage_in_bytes": "4000\n",
                f"{V1}memory.stat": "inactive_file 1\ntotal_inactive_file 700\n",
            },
            1700,
        ),
        (
            {
                "proc/self/cgroup": "2:memory:/\n",
                f"{V1}memory.limit_in_bytes": "9223372036854771712\n",
                f"{V1}memory.usage_in_bytes": "4000\n",
            },
            8000 << 10,
        ),
    ],
    ids=["version 2, of a group around it", "version 1, in a container", "no limit"],
)
def test_the_least_of_host_and_cgroups_counts(
    tmp_path: Path, files: dict[str, str], left: int
) -> None:
    root = tree(tmp_path, MEMINFO | files)
    check_room("memory", left, root)
    with pytest.raises(ValueError, match=f"memory={left + 1} ") as refused:
        check_room("memory", left + 1, root)
    assert "MiB are left" in str(refused.value)


@given(st.text(max_size=200))
def test_a_table_that_cannot_be_read_says_nothing(text: str) -> None:
    assert meminfo_room(text) is None or "MemAvailable" in text


@pytest.mark.parametrize(
    ("left", "chunk"),
    [(None, 64), (1 << 40, 64), (1024, 64), (1023, 32), (100, 4), (16, 1), (0, 1)],
)
def test_memory_in_transit_fits_into_half_of_what_is_left(left: int | None, chunk: int) -> None:
    assert transit_chunk_bytes(None if left is None else left * MIB) == chunk * MIB


def test_an_owner_that_lends_nothing_starts_in_a_small_container(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "least_room", lambda: Room(100 * MIB, "in the cgroup x"))
    had: list[OwnerCard] = []

    @contextmanager
    def started(store: OwningStore) -> Iterator[None]:
        own = store._pool.own
        assert own is not None
        had.append(own.card)
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    with contextlib.closing(lock):
        serve(config(directory), place, lock, 600.0, started)
    assert [one.object_bytes_max for one in had] == [4 * MIB]
    assert "100 MiB of memory are left in the cgroup x: no object of more than 4 MiB" in caplog.text


def test_more_memory_than_there_is_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="more memory than this process can have"):
        owning(config(directory, 1 << 46))


def test_memory_that_servers_hold_of_the_last_owner_is_named(directory: Path) -> None:
    left = MemoryFile.make(4 * MIB)
    was = agreement.wishes(config(directory, 4 * MIB))
    brought = Brought(os.dup(left.readable_fd), left.name, was)
    held = "MiB are left .* hold 4 MiB of .*: memory=4194304 and chunk_bytes=0 take that over"
    with pytest.raises(ValueError, match=held):
        serving._fitting(config(directory, 1 << 46), brought)
    left.close()


@pytest.mark.slow
def test_serve_says_so_in_one_sentence(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore", "serve", "--memory=64TiB", f"--directory={directory}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvstore serve: memory=70368744177664 (67108864 MiB) is more")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["disk", "objects"])
def test_a_disk_that_is_not_mounted_is_not_made_on_another(directory: Path, name: str) -> None:
    missing = directory / "mnt" / "kv"
    place = missing if name == "disk" else missing.as_uri()
    more = {name: place, f"{name}_size": 16 * MIB}
    with pytest.raises(ValueError, match=f"{name}=.*there is no directory {missing.parent}"):
        owning(config(directory, 2 * MIB, **more))
    assert not missing.parent.exists()


def test_a_file_without_room_is_named_and_not_left(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "slab"
    free = os.statvfs(directory)
    nbytes = 2 * free.f_blocks * free.f_frsize
    monkeypatch.setattr(host_memory, "check_room", lambda *_: None)
    # It would take all blocks before it fails, and others' writes fail meanwhile.
    monkeypatch.setattr(os, "posix_fallocate", None)
    with pytest.raises(ValueError, match=f"file='{path}' needs [0-9]+ bytes, and its file system"):
        owning(config(directory, nbytes, file=path))
    assert not path.exists()
