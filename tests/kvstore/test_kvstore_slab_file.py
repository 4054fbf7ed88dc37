# SPDX-License-Identifier: Apache-2.0
"""Memory in a file: what a killed process has lent is there after its restart."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from store_host import shared
from store_makers import SIG, Room, config, contents, keys, until
from store_meeting import owning

from kvstore.config import Config
from kvstore.memory.slab import UNIT_BYTES
from kvstore.memory.slab_file import SlabFile
from kvstore.objects.outcomes import Got, Put
from kvstore.store import Store

MIB = 1 << 20
CHUNK = 64 << 10
N, NBYTES = 12, 20_000
KEYS = keys(N)


@pytest.fixture
def serve(directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`kvstore serve --memory 8MiB --file`."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvstore", "serve", "--memory=8MiB"]
        one = subprocess.Popen(
            [*command, f"--directory={directory}/s", f"--file={directory}/slab"],
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
        )
        started.append(one)
        assert one.stdout is not None
        assert "lends" in one.stdout.readline()
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.slow
def test_a_restarted_lender_has_its_keys_again(
    serve: Callable[..., subprocess.Popen[str]], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.host.lifetime.ENDED_S", 3600.0)  # Nobody starts one meanwhile.
    first = serve()
    with Store(shared(directory / "s", 0)) as store:
        room = Room(store, N, NBYTES)
        room.bytes[:] = contents(N, NBYTES)
        until(lambda: store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N, "they are stored")
        until(lambda: store.exists(KEYS, SIG, NBYTES).all(), "they are announced")
        first.kill()
        first.wait()
        until(lambda: not store.exists(KEYS, SIG, NBYTES).any(), "its keys are gone")
        with (directory / "slab").open("r+b") as file:  # One byte of the fourth object.
            whole = np.memmap(file, np.uint8)
            changed = whole.tobytes().index(contents(N, NBYTES)[3].tobytes())
            whole[changed + 7] ^= 1
            del whole
        serve()
        until(lambda: store.exists(KEYS, SIG, NBYTES).sum() == N - 1, "all but one are back")
        room.bytes[:] = 0
        expected = [Got.RIGHT] * N
        expected[3] = Got.MISSING
        assert store.get(KEYS, SIG, room.pieces) == expected
        right = np.arange(N) != 3
        assert (room.bytes[right] == contents(N, NBYTES)[right]).all()
        room.bytes[:] = contents(N, NBYTES)
        assert store.put(KEYS, SIG, room.pieces).count(Put.STORED) == 1, "and it goes on"


def test_an_owner_knows_what_its_file_has(directory: Path) -> None:
    """Without any other process; closed in order and opened again."""
    settings = config(directory / "s", 8 * MIB, file=directory / "slab")
    with owning(settings) as store:
        room = Room(store, N, NBYTES)
        room.bytes[:] = contents(N, NBYTES)
        assert store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N
    with owning(settings) as store:
        room = Room(store, N, NBYTES)
        assert store.exists(KEYS, SIG, NBYTES).all()
        assert store.get(KEYS, SIG, room.pieces) == [Got.RIGHT] * N
        assert (room.bytes == contents(N, NBYTES)).all()


def test_each_process_needs_a_file_of_its_own(directory: Path) -> None:
    path = directory / "slab"
    first = SlabFile(path, 16 * CHUNK, CHUNK)
    with pytest.raises(ValueError, match="in use by another process of the store"):
        SlabFile(path, 16 * CHUNK, CHUNK)
    first.close()
    SlabFile(path, 16 * CHUNK, CHUNK).close()


def test_other_settings_and_other_files_are_left_alone(directory: Path) -> None:
    path = directory / "slab"
    SlabFile(path, 16 * CHUNK, CHUNK).close()
    for nbytes, chunk in ((32 * CHUNK, CHUNK), (16 * CHUNK, 2 * CHUNK)):
        with pytest.raises(ValueError, match="was not made with these settings"):
            SlabFile(path, nbytes, chunk)
    path.write_bytes(b"somebody's letters")
    with pytest.raises(ValueError, match="was not made with these settings"):
        SlabFile(path, 16 * CHUNK, CHUNK)
    assert path.read_bytes() == b"somebody's letters"


def test_others_must_not_read_it(directory: Path) -> None:
    path = directory / "slab"
    path.touch(0o644)
    with pytest.raises(ValueError, match="closed to all others"):
        SlabFile(path, 16 * CHUNK, CHUNK)
    with pytest.raises(ValueError, match="is no regular file"):
        SlabFile(Path("/dev/null"), 16 * CHUNK, CHUNK)
    path.unlink()
    path.symlink_to(directory / "elsewhere")
    with pytest.raises(OSError, match="symbolic links") as raised:
        SlabFile(path, 16 * CHUNK, CHUNK)
    assert raised.value.errno == errno.ELOOP


def test_one_that_was_not_finished_is_made_anew(directory: Path) -> None:
    """Its process was killed before it wrote the head."""
    path = directory / "slab"
    path.touch(0o600)
    os.truncate(path, UNIT_BYTES + 5)
    file = SlabFile(path, 16 * CHUNK, CHUNK)
    assert file.buffer.nbytes == 16 * CHUNK
    assert not np.frombuffer(file.buffer, np.uint8).any()
    file.close()


def test_a_file_takes_memory(directory: Path) -> None:
    with pytest.raises(ValueError, match="needs memory: say how much"):
        Config(file=directory / "slab")
