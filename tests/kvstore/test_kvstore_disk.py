# SPDX-License-Identifier: Apache-2.0
"""Segment files on a real file system."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from store_makers import contents

from kvstore.memory.policies import POLICIES
from kvstore.memory.slab import UNIT_BYTES
from kvstore.tiers.base import Laid, Wanted, Written
from kvstore.tiers.disk import BATCH_MAX, Disk
from kvstore.tiers.segmentfiles import SegmentFiles, aligned
from kvstore.tiers.tombstones import Tombstones

MIB = 1 << 20
N, NBYTES = 20, 20_000
OBJECTS = contents(N, NBYTES)
NAMES = [bytes([i]) * 32 for i in range(N)]
LARGEST = 256 << 10
SIZE = 2 * MIB


@contextmanager
def disk_at(path: Path, size: int = SIZE, largest: int = LARGEST) -> Iterator[Disk]:
    disk = Disk(path, size, largest, POLICIES["lru"])
    try:
        yield disk
    finally:
        disk.close()


def laid(row: int, data: np.ndarray | None = None) -> Laid:
    raw = (OBJECTS[row] if data is None else data).tobytes()
    memory = aligned(-(-len(raw) // UNIT_BYTES) * UNIT_BYTES)
    memory[: len(raw)] = raw
    return Laid(NAMES[row], len(raw), xxhash.xxh3_64_intdigest(raw), memory)


def put(disk: Disk, rows: Any) -> Written:
    return disk.write([laid(row) for row in rows])


def read(disk: Disk, row: int, nbytes: int = NBYTES) -> bytes | None:
    memory = aligned(-(-nbytes // UNIT_BYTES) * UNIT_BYTES)
    (checksum,) = disk.read([Wanted(NAMES[row], nbytes, memory)])
    if checksum is None:
        return None
    assert checksum == xxhash.xxh3_64_intdigest(memory[:nbytes])
    return bytes(memory[:nbytes])


def place_of(disk: Disk, row: int) -> tuple[Path, int]:
    """The file of an object, and where its head begins."""
    place = disk._segments.place(NAMES[row])
    assert place is not None
    segment, unit = disk._segments.segment_of(place)
    return disk._directory / f"segment-{segment:05}", (1 + unit) * UNIT_BYTES


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    with disk_at(tmp_path / "d") as disk:
        assert disk.found() == []
        assert put(disk, range(N)) == Written([True] * N, [])
        assert read(disk, 3) == OBJECTS[3].tobytes()
        assert read(disk, 3, NBYTES + 1) is None, "of another size"
        disk.remove([NAMES[0], b"?" * 32])
        assert read(disk, 0) is None
    with disk_at(tmp_path / "d") as disk:
        found = {one.name: one.nbytes for one in disk.found()}
        assert found == dict.fromkeys(NAMES[1:], NBYTES)
        for row in range(1, N):
            assert read(disk, row) == OBJECTS[row].tobytes()
        usage = disk.usage()
        assert (usage.objects, usage.nbytes) == (N - 1, (N - 1) * NBYTES)
        assert (usage.failed, usage.corrupted) == (0, 0)
        assert put(disk, [0]).stored == [True]
        assert read(disk, 0) == OBJECTS[0].tobytes()


@pytest.mark.parametrize("nbytes", [1, UNIT_BYTES, UNIT_BYTES + 1, 100_000, LARGEST])
def test_objects_of_all_sizes(tmp_path: Path, nbytes: int) -> None:
    data = contents(2, nbytes, seed=3)
    with disk_at(tmp_path / "d") as disk:
        assert disk.write([laid(i, data[i]) for i in range(2)]).stored == [True, True]
    with disk_at(tmp_path / "d") as disk:
        assert len(disk.found()) == 2
        assert [read(disk, i, nbytes) for i in range(2)] == [one.tobytes() for one in data]


def test_what_does_not_fit_pushes_out_what_was_read_longest_ago(tmp_path: Path) -> None:
    with disk_at(tmp_path / "d", 2 * (LARGEST + 2 * UNIT_BYTES)) as disk:
        capacity = 2 * ((LARGEST + UNIT_BYTES) // (6 * UNIT_BYTES))
        assert capacity == N
        first = put(disk, range(N))
        assert first.gone == []
        large = contents(1, LARGEST, seed=4)[0]
        written = disk.write([laid(0, large)])
        assert written.stored == [True]
        assert 0 < len(written.gone) < N
        for row in range(1, N):
            assert (read(disk, row) is None) == (NAMES[row] in written.gone)
        assert read(disk, 0, LARGEST) == large.tobytes()


@pytest.mark.parametrize("at", [0, 8, 60, UNIT_BYTES, UNIT_BYTES + NBYTES - 1])
def test_another_byte_is_noticed(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    """In the head or in the object; while the process runs."""
    with disk_at(tmp_path / "d") as disk:
        put(disk, range(N))
        path, start = place_of(disk, 5)
        with path.open("rb") as file:
            file.seek(start + at)
            old = file.read(1)
        overwrite(path, start + at, bytes([old[0] ^ 1]))
        assert read(disk, 5) is None
        assert "cannot be read as it was written; it is dropped" in caplog.text
        assert disk.usage().corrupted == 1
        assert disk.usage().objects == N - 1
        assert read(disk, 4) == OBJECTS[4].tobytes()
        assert put(disk, [5]).stored == [True]
        assert read(disk, 5) == OBJECTS[5].tobytes()


def test_the_last_writes_are_compared_after_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process was killed in the middle of one: its head is there, and its object is not."""
    with disk_at(tmp_path / "d") as disk:
        put(disk, range(N))
        path, start = place_of(disk, N - 1)
    overwrite(path, start + 2 * UNIT_BYTES, bytes(UNIT_BYTES))
    with disk_at(tmp_path / "d") as disk:
        assert {one.name for one in disk.found()} == set(NAMES[:-1])
        assert "is incomplete, and dropped" in caplog.text
        assert put(disk, [N - 1]).stored == [True]
    with disk_at(tmp_path / "d") as disk:
        assert len(disk.found()) == N
    assert BATCH_MAX >= N


def test_a_segment_without_a_head_has_nothing(tmp_path: Path) -> None:
    with disk_at(tmp_path / "d") as disk:
        put(disk, range(N))
        path, _ = place_of(disk, 0)
    overwrite(path, 0, bytes(64))
    with disk_at(tmp_path / "d") as disk:
        assert len(disk.found()) < N
        assert all(disk.write([laid(row)]).stored == [True] for row in range(N))
        assert [read(disk, row) for row in range(N)] == [one.tobytes() for one in OBJECTS]


@contextmanager
def files_end_at(nbytes: int) -> Iterator[None]:
    """Writes behind it fail: with EFBIG, as they do with ENOSPC on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_disk_that_refuses_writes_costs_what_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with disk_at(tmp_path / "d") as disk:
        put(disk, [0])
        with files_end_at(2 * UNIT_BYTES):
            assert put(disk, [1, 2]).stored == [False, False]
            # A class of its own, whose segment needs a head.
            with files_end_at(1):
                assert disk.write([laid(3, contents(1, LARGEST)[0])]).stored == [False]
            assert read(disk, 0) == OBJECTS[0].tobytes()
        assert caplog.text.count("cannot be read or written") == 1, "once, whatever fails"
        assert disk.usage().failed >= 3
        assert put(disk, [1, 2, 4]).stored == [True] * 3
        assert disk.write([laid(3, contents(1, LARGEST)[0])]).stored == [True]
        assert "can be written again" in caplog.text
    with disk_at(tmp_path / "d") as disk:
        assert {one.name for one in disk.found()} == {NAMES[i] for i in (0, 1, 2, 3, 4)}


def test_a_file_that_became_shorter_costs_what_lay_there(tmp_path: Path) -> None:
    with disk_at(tmp_path / "d") as disk:
        put(disk, range(N))
        path, _ = place_of(disk, 0)
        os.truncate(path, UNIT_BYTES)
        lost = [row for row in range(N) if read(disk, row) is None]
        assert 0 in lost
        assert disk.usage().failed == len(lost)
        assert disk.usage().objects == N - len(lost)
    with pytest.raises(ValueError, match=r"too small for objects of up to|is no segment of"):
        disk_at(tmp_path / "d").__enter__()


def test_no_space_for_the_files_is_a_sentence(tmp_path: Path) -> None:
    with files_end_at(MIB), pytest.raises(OSError, match=r"cannot be made .*: give less as disk_s"):
        disk_at(tmp_path / "d", 4 * MIB, 2 * MIB).__enter__()
    assert [one.name for one in (tmp_path / "d").iterdir()] == ["lock"], "nothing is left"
    with disk_at(tmp_path / "d", 4 * MIB, 2 * MIB) as disk:
        assert disk.found() == []


def test_more_than_the_file_system_has_takes_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a part of the files: others' writes to the file system would fail meanwhile."""
    monkeypatch.setattr(os, "posix_fallocate", None)
    free = os.statvfs(tmp_path)
    size = 2 * free.f_blocks * free.f_frsize
    with pytest.raises(OSError, match=r"segments of .* cannot be made \(No space") as raised:
        disk_at(tmp_path / "d", size).__enter__()
    assert raised.value.errno == errno.ENOSPC
    assert [one.name for one in (tmp_path / "d").iterdir()] == ["lock"]


def test_two_processes_on_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        disk_at(tmp_path / "d"),
        pytest.raises(ValueError, match="is in use by another process of the store"),
    ):
        disk_at(tmp_path / "d").__enter__()
    with disk_at(tmp_path / "d") as disk:
        assert disk.found() == []


def test_other_sizes_keep_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with disk_at(tmp_path / "d") as disk:
        put(disk, range(N))
        segment_bytes = disk._files.segment_bytes
    with disk_at(tmp_path / "d", 2 * SIZE) as disk:
        assert len(disk.found()) == N
        assert (disk._files.count, disk._files.segment_bytes) == (
            2 * SIZE // segment_bytes,
        ) * 1 + (segment_bytes,)
    with disk_at(tmp_path / "d", segment_bytes) as disk:
        assert len(disk.found()) <= N
        assert disk._files.count == 1
        assert f"{2 * SIZE // segment_bytes - 1} segments of" in caplog.text
        assert "are removed: disk_size has no room for them" in caplog.text
    with pytest.raises(ValueError, match=r"is too small: .* needs segments of"):
        disk_at(tmp_path / "d", 1).__enter__()
    with pytest.raises(ValueError, match=r"which are too small for objects of up to 1048576"):
        disk_at(tmp_path / "d", SIZE, MIB).__enter__()


def test_what_is_not_the_stores_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match="closed to all others"):
        disk_at(tmp_path / "open").__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is no directory"):
        disk_at(tmp_path / "file").__enter__()
    (tmp_path / "d").mkdir(mode=0o700)
    (tmp_path / "d/segment-00000").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match=r"cannot be made|symbolic links"):
        disk_at(tmp_path / "d").__enter__()
    (tmp_path / "d/segment-00000").unlink()
    (tmp_path / "d/segment-00000").write_bytes(bytes(5000))
    with pytest.raises(ValueError, match="which are too small"):
        disk_at(tmp_path / "d").__enter__()


def test_a_file_system_without_direct_io_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with disk_at(tmp_path / "d") as disk:
        assert put(disk, range(N)).stored == [True] * N
        assert read(disk, 1) == OBJECTS[1].tobytes()
    assert caplog.text.count("refuses O_DIRECT") == 1


def test_reads_and_writes_pass_by_the_kernels_cache(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "d", SIZE, LARGEST)
    flags = Path(f"/proc/self/fdinfo/{files._fds[0]}").read_text()
    files.close()
    assert int(flags.split("flags:")[1].split()[0], 8) & os.O_DIRECT


@contextmanager
def tombstones_at(path: Path) -> Iterator[Tombstones]:
    stones = Tombstones(path)
    try:
        yield stones
    finally:
        stones.close()


def test_a_tombstone_that_a_full_disk_cuts_short_leaves_the_others_readable(
    tmp_path: Path,
) -> None:
    path = tmp_path / "removed"
    with tombstones_at(path) as stones:
        with files_end_at(40), pytest.raises(OSError, match="the disk is full"):
            stones.remove(NAMES[:2])
        stones.remove(NAMES[2:3])
        assert stones.removed(NAMES) == [NAMES[0], NAMES[2]]
    with path.open("ab") as file:  # As a process that is killed meanwhile.
        file.write(NAMES[3][:8])
    with tombstones_at(path) as stones:
        stones.remove(NAMES[4:5])
        assert stones.removed(NAMES) == [NAMES[0], NAMES[2], NAMES[4]]
