# SPDX-License-Identifier: Apache-2.0
"""Weights are told apart by every byte of their files, which are read once."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.objects import file_digests
from kvstore.objects.file_digests import KEPT, FileDigests
from kvstore.objects.weights import identity, identity_of_config, identity_of_file

LARGE = file_digests.SMALL_BYTES
OLD_NS = 1_600_000_000 * 10**9


def write_model(folder: Path, change: int | None = None) -> Path:
    """A directory with one safetensors file of two tensors; one number of it is changed."""
    folder.mkdir()
    numbers = np.arange(2000, dtype="<f4")
    if change is not None:
        numbers[change] += 1
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
            "b": {"dtype": "F32", "shape": [1000], "data_offsets": [4000, 8000]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + numbers.tobytes()
    )
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return folder


def test_weights_are_told_apart_by_every_byte(tmp_path: Path) -> None:
    first = identity(write_model(tmp_path / "a"))
    assert identity(write_model(tmp_path / "b")) == first, "the name says nothing"
    found = {identity(write_model(tmp_path / f"c{i}", i)) for i in range(0, 2000, 97)}
    assert len(found | {first}) == len(range(0, 2000, 97)) + 1


@pytest.mark.parametrize(
    "name",
    ["config.json", "params.json", "hf_quant_config.json", "modeling.py", "part/more.safetensors"],
)
def test_each_file_that_changes_values_counts(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m")
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    first = identity(folder)
    path.write_text("2")
    assert identity(folder) != first


def test_what_names_tokens_does_not_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    first = identity(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("new")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.json").write_text("{}")
    assert identity(folder) == first


def test_weights_without_safetensors_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="has no safetensors files"):
        identity(tmp_path)


def test_a_single_file_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text("1")
    first = identity_of_file(path)
    path.write_text("2")
    assert identity_of_file(path) != first


def test_a_resolved_configuration_counts_but_for_where_it_was_found() -> None:
    first = identity_of_config({"rope_theta": 1, "_name_or_path": "/a"})
    assert identity_of_config({"_name_or_path": "/b", "rope_theta": 1}) == first
    assert identity_of_config({"rope_theta": 2}) != first


# -- digests that are kept


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that was written long ago, as a new one is read again each time."""
    path = tmp_path / "m" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"a" * LARGE)
    return path


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], str]:
    monkeypatch.setattr(file_digests, "YOUNG_NS", -(10**18))

    def of(path: Path) -> str:
        with FileDigests(tmp_path / "m", tmp_path / "cache") as digests:
            return digests.of([path])[path]

    return of


def test_a_large_file_is_read_once(
    large: Path, digest: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = digest(large)
    assert first == f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'a' * LARGE)}"
    assert "reading 1 files of weights" in caplog.text
    caplog.clear()
    assert digest(large) == first
    assert "reading" not in caplog.text
    assert [one.name for one in large.parent.iterdir() if one != large] == [KEPT]


def test_a_file_that_was_written_in_place_is_read_again(
    large: Path, digest: Callable[[Path], str]
) -> None:
    first = digest(large)
    status = large.stat()
    with large.open("r+b") as file:
        file.write(b"b")
    os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest(large) != first, "its times of change tell, where its times of writing lie"


def test_the_digest_of_a_file_that_is_still_written_is_not_kept(
    large: Path, digest: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_digests, "YOUNG_NS", 10**18)
    digest(large)
    assert not (large.parent / KEPT).exists()


def test_a_file_that_changes_while_it_is_read_is_refused(
    large: Path, digest: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = FileDigests._read

    def read_and_write(self: FileDigests, path: Path) -> str:
        found = read(self, path)
        path.write_bytes(b"b" * (LARGE + 1))
        return found

    monkeypatch.setattr(FileDigests, "_read", read_and_write)
    with pytest.raises(ValueError, match=r"model.safetensors was written while it was read"):
        digest(large)


def test_digests_of_a_directory_that_cannot_be_written_are_kept_elsewhere(
    large: Path,
    digest: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    replace = file_digests._replace

    def read_only(place: Path, raw: bytes) -> None:
        if place.parent == large.parent:
            raise PermissionError(place)
        replace(place, raw)

    monkeypatch.setattr(file_digests, "_replace", read_only)
    first = digest(large)
    assert not (large.parent / KEPT).exists()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    caplog.set_level(logging.INFO)
    assert digest(large) == first
    assert not caplog.text


@pytest.mark.parametrize("kept", [b"", b"[]", b'{"model.safetensors": 5}'])
def test_what_is_kept_and_cannot_be_right_is_not_used(
    large: Path, digest: Callable[[Path], str], kept: bytes
) -> None:
    (large.parent / KEPT).write_bytes(kept)
    assert digest(large) == f"xxh3-128:{xxhash.xxh3_128_hexdigest(b'a' * LARGE)}"


def test_what_others_may_write_is_not_used(
    large: Path, digest: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    status = large.stat()
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    kept = large.parent / KEPT
    kept.write_text(json.dumps({"model.safetensors": [stamp, "xxh3-128:theirs"]}))
    assert digest(large) == "xxh3-128:theirs", "else the rest of this test would show nothing"
    kept.chmod(0o666)
    assert digest(large) != "xxh3-128:theirs"
    assert "may be another user's" in caplog.text


def test_a_snapshot_of_hugging_face_names_its_hashes(
    tmp_path: Path, digest: Callable[[Path], str]
) -> None:
    blob = tmp_path / "blobs" / ("a1" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    os.utime(blob, ns=(OLD_NS, OLD_NS))
    (tmp_path / "m").mkdir()
    link = tmp_path / "m" / "model.safetensors"
    link.symlink_to(blob)
    assert digest(link) == f"sha256:{blob.name}"
    link_ns = link.lstat().st_mtime_ns
    os.utime(blob, ns=(link_ns + 1, link_ns + 1))
    assert digest(link).startswith("xxh3-128:"), "it was written after it was named"
    plain = tmp_path / "m" / "config.json"
    plain.symlink_to(tmp_path / "blobs" / ("b2" * 20))
    plain.resolve().write_bytes(b"{}")
    assert digest(plain).startswith("xxh3-128:"), "the name of a small file is not its SHA-256"
