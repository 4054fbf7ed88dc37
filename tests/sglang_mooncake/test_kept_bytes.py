# SPDX-License-Identifier: Apache-2.0
"""Files with the bytes of what differs."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from handover import until

from sglang_mooncake import kept_bytes
from sglang_mooncake.kept_bytes import FILES_MAX, KeptBytes

CELLS = {"page 3 in k of layer 0": np.arange(8, dtype=np.uint8)}


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*"))


def keep(kept: KeptBytes, room: int, reason: str = "") -> None:
    assert kept.claim(room)
    kept.keep(room, reason, CELLS)


def test_a_file_has_each_cell_by_its_name_and_the_reason_and_is_for_its_owner(tmp_path, caplog):
    directory = tmp_path / "kept"
    kept = KeptBytes(directory, "rank 3")
    kept.start()
    keep(kept, 7, "the reason")
    kept.close()
    kept.close()
    (path,) = files(directory)
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    with np.load(path) as found:
        about = [str(found[name]) for name in ("rank", "room", "reason")]
        assert about == ["rank 3", "7", "the reason"]
        assert found["page 3 in k of layer 0"].tolist() == list(range(8))
    assert f"8 bytes of room 7 that differ, in 1 cells, are kept in {path}" in caplog.text


def test_a_directory_has_so_many_files_and_no_more(tmp_path, caplog):
    """Also of what a process that was killed has left of one."""
    for number in range(FILES_MAX):
        (tmp_path / f"difference-{number:02d}.npz").touch()
    (tmp_path / "difference-07.npz").unlink()
    kept = KeptBytes(tmp_path, "")
    kept.start()
    for room in (1_000, 1_001):
        keep(kept, room)
    until(lambda: "remove some" in caplog.text, "the directory is full")
    assert not kept.claim(1_002)
    kept.close()
    assert len(files(tmp_path)) == FILES_MAX
    with np.load(tmp_path / "difference-07.npz") as found:
        assert int(found["room"]) == 1_000
    said = f"{tmp_path} has {FILES_MAX} files of bytes already: remove some"
    assert f"the bytes of room 1001 that differ are not kept: {said}" in caplog.text
    assert "room 1002 that differ are not kept: the last file could not be written" in caplog.text
    assert "Traceback" not in caplog.text


def test_of_ranks_that_write_the_last_file_at_the_same_moment_one_has_it(
    tmp_path, monkeypatch, caplog
):
    for number in range(FILES_MAX - 1):
        (tmp_path / f"difference-{number:02d}.npz").touch()
    both, create = threading.Barrier(2), os.open

    def together(path, *more):
        if str(path).endswith(f"difference-{FILES_MAX - 1}.npz"):
            both.wait(60)
        return create(path, *more)

    monkeypatch.setattr(kept_bytes.os, "open", together)
    ranks = [KeptBytes(tmp_path, ""), KeptBytes(tmp_path, "")]
    for rank in ranks:
        rank.start()
        keep(rank, 1)
    for rank in ranks:
        rank.close()
    assert len(files(tmp_path)) == FILES_MAX
    assert caplog.text.count("are kept in") == 1
    assert caplog.text.count("remove some") == 1


def test_a_disk_that_is_slow_holds_nobody_up(tmp_path, monkeypatch, caplog):
    begun, go_on = threading.Event(), threading.Event()
    write = np.savez

    def late(*args, **cells):
        begun.set()
        go_on.wait()
        write(*args, **cells)

    monkeypatch.setattr(kept_bytes.np, "savez", late)
    kept = KeptBytes(tmp_path, "")
    kept.start()
    keep(kept, 0)
    assert begun.wait(60)
    for room in range(1, kept_bytes._UNWRITTEN_MAX - 1):
        keep(kept, room)
    assert kept.claim(3)  # Its bytes are being read.
    for room in range(4, 100):
        assert not kept.claim(room)
    assert caplog.text.count("are not kept") == 1
    said = "those of 4 others are not written yet"
    assert f"room 4 that differ are not kept: {said}" in caplog.text
    kept.keep(3, "", None)
    keep(kept, 100)
    go_on.set()
    until(lambda: len(list(tmp_path.glob("*.npz"))) == 4, "those before it are written")
    kept.close()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, caplog):
    def full(*args, **cells):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_bytes.np, "savez", full)
    kept = KeptBytes(tmp_path, "")
    kept.start()
    keep(kept, 3)
    kept.close()
    assert not files(tmp_path)
    assert "No space left on device" in caplog.text


def test_a_directory_that_cannot_be_made_is_told_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        KeptBytes(tmp_path / "file", "")
