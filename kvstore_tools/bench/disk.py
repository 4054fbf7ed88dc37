# SPDX-License-Identifier: Apache-2.0
"""What a disk gives through the store: ``kvstore bench --disk DIR``. Beside it, in each round,
objects in memory, and plain reads of the store's own segment files by as many threads."""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

import te
from kvstore.config import Config
from kvstore.objects.changes import Keys, keys_of_hex
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.objects.signature import Signature
from kvstore.owner.card import OwnerStats
from kvstore.store import Store
from kvstore.tiers.disk import THREADS
from kvstore.tiers.segmentfiles import aligned
from kvstore_tools.bench.contenders import await_end, names_of

__all__ = ["measure", "text"]

SIGNATURE: Final = Signature(
    weights="bench", dtype="-", page_size=1, layers=(0, 0), heads=(0, 0), layout="bench/1"
).digest
DEADLINE_S: Final = 120.0


def measure(
    directory: Path, nbytes: int, batch: int, rounds: int, memory: int = 256 << 20
) -> Mapping[str, float]:
    """Medians in GB/s. The files are made in a new folder of the directory, and removed.

    Args:
        directory: on the disk.
        nbytes: of an object.
        batch: objects of one get.
        rounds: of them, each with other objects.
        memory: that the store has above the disk; a batch is an eighth of it at most.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    batches = [keys_of_hex(names_of(batch, seed)) for seed in range(rounds)]
    fillers = [
        keys_of_hex(names_of(batch, 1000 + i)) for i in range(2 * memory // (nbytes * batch))
    ]
    size = 2 * (len(batches) + len(fillers)) * batch * (nbytes + (64 << 10)) + memory
    with _store(directory, memory, size) as (store, disk):
        buffer = te.allocate(2 * batch * nbytes)
        store.register(buffer)
        room = np.frombuffer(buffer, np.uint8)[: 2 * batch * nbytes].reshape(2, batch, nbytes)
        room[0] = np.random.default_rng(1).integers(0, 256, room[0].shape, np.uint8)
        begun_s = time.perf_counter()
        for keys in (*batches, *fillers):
            _put(store, keys, room[0])
        _await_quiet(store)
        while not all(store.exists(keys, SIGNATURE, nbytes).all() for keys in (*batches, *fillers)):
            for keys in (*batches, *fillers):
                _put(store, keys, room[0])
        demoted = _own(store).demoted
        seconds = time.perf_counter() - begun_s
        found["put, and written to the disk"] = [demoted * nbytes / 1e9 / seconds]
        for (
            keys
        ) in fillers:  # What lies in memory is on the disk, too, then, and goes without a write.
            _get(store, keys, room)
        _await_quiet(store)
        for keys in batches:
            for row in ("get from the disk", "get from memory"):  # It is there after the first.
                found[row].append(_get(store, keys, room))
            found["pread with O_DIRECT"].append(_pread(disk, nbytes, batch, len(found)))
    return {row: statistics.median(values) for row, values in found.items()}


def text(figures: Mapping[str, float]) -> str:
    """A row for each, with its ratio to plain reads."""
    plain = figures["pread with O_DIRECT"]
    return "\n".join(
        f"{row:<28}  {value:6.2f} GB/s  {value / plain:5.2f}" for row, value in figures.items()
    )


@contextmanager
def _store(directory: Path, memory: int, size: int) -> Iterator[tuple[Store, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="kv") as place,
        tempfile.TemporaryDirectory(prefix="kv", dir=directory) as disk,
        contextlib.ExitStack() as behind,
    ):
        here = Path(place) / "s"
        behind.callback(await_end, here)
        store = behind.enter_context(
            Store(
                Config(
                    memory=memory,
                    disk=Path(disk),
                    disk_size=size,
                    directory=here,
                    linger_s=0.0,
                    engine=te.Config(status_dir=None),
                )
            )
        )
        yield store, Path(disk)


def _own(store: Store) -> OwnerStats:
    """What the owner tells of itself."""
    own = store.figures().own
    if own is None:
        raise RuntimeError("the owner of the store does not answer")
    return own


def _put(store: Store, keys: Keys, source: np.ndarray) -> None:
    """Slowly: with each call that the memory has no room for, the owner may drop objects."""
    deadline_s = time.monotonic() + DEADLINE_S
    left = np.arange(len(keys))
    while len(left):
        _await_quiet(store)
        outcomes = store.put(keys[left], SIGNATURE, _pieces(source).of(left))
        left = left[[one not in (Put.STORED, Put.EXISTS) for one in outcomes]]
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{len(left)} objects could not be stored: {set(outcomes)}")


def _await_quiet(store: Store) -> None:
    """Until nothing is on its way down."""
    deadline_s = time.monotonic() + DEADLINE_S
    while waiting := _own(store).demoting:
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{waiting} objects are not written to the disk in time")
        time.sleep(0.001)


def _get(store: Store, keys: Keys, room: np.ndarray) -> float:
    room[1] = 0
    begun_s = time.perf_counter()
    outcomes = store.get(keys, SIGNATURE, _pieces(room[1]), DEADLINE_S)
    seconds = time.perf_counter() - begun_s
    if set(outcomes) != {Got.RIGHT} or (room[1] != room[0]).any():
        raise RuntimeError(f"a get did not bring what was stored: {set(outcomes)}")
    return float(room[0].nbytes / 1e9 / seconds)


def _pread(disk: Path, nbytes: int, batch: int, seed: int) -> float:
    """Blocks of an object's size, at random places of the segments."""
    fds = [os.open(one, os.O_RDONLY | os.O_DIRECT) for one in sorted(disk.glob("segment-*"))]
    try:
        rng = np.random.default_rng(seed)
        units = -(-nbytes // 4096) * 4096
        last = os.fstat(fds[0]).st_size - units
        places = [
            (fds[int(rng.integers(len(fds)))], int(rng.integers(last // 4096 + 1)) * 4096)
            for _ in range(batch)
        ]
        buffers: Sequence[memoryview] = [aligned(units) for _ in range(batch)]
        with ThreadPoolExecutor(THREADS) as pool:
            begun_s = time.perf_counter()
            list(pool.map(lambda b, p: os.preadv(p[0], [b], p[1]), buffers, places))
            return batch * nbytes / 1e9 / (time.perf_counter() - begun_s)
    finally:
        for fd in fds:
            os.close(fd)


def _pieces(rows: np.ndarray) -> Pieces:
    start, step = rows.ctypes.data, rows.strides[0]
    return Pieces.whole(start + np.arange(len(rows), dtype=np.uint64) * step, rows.shape[1])
