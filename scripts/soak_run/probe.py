# SPDX-License-Identifier: Apache-2.0
"""A client of the store beside the servers: stores and loads objects of its own, and looks at how
long that takes. `python -m soak_run.probe SPEC` does so until it is told to end (SIGTERM), and
prints what it has seen as a line of JSON.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import te
from kvstore.config import Config
from kvstore.loading import Load
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.store import Store
from soak_run.results import Probed

__all__ = ["BEGUN", "Spec"]

BEGUN: Final = "the objects are stored"
OBJECTS: Final = 48
NEW: Final = 12
PIECES, PIECE_BYTES = 3, 4096
SIGNATURE: Final = bytes(range(16))
FOUND_S: Final = 60.0
PAUSE_S: Final = 0.05


class Spec(msgspec.Struct, frozen=True):
    """settings: of ``kvstore.Config``. timeout_s: of each put, load and get. status_dir: of the
    engines' status sockets, also of an owner that it has to start."""

    settings: dict[str, Any]
    transports: tuple[str, ...]
    timeout_s: float
    status_dir: str | None = None


class Probe:
    """One client's objects and figures."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._bytes = np.zeros((OBJECTS, PIECES * PIECE_BYTES), np.uint8)
        store.register(self._bytes)
        start = self._bytes.ctypes.data
        begins = start + np.arange(OBJECTS, dtype=np.uint64) * np.uint64(self._bytes.shape[1])
        offsets = np.arange(PIECES, dtype=np.uint64) * np.uint64(PIECE_BYTES)
        self._pieces = Pieces(begins[:, None] + offsets, np.full(PIECES, PIECE_BYTES))
        self._right = _contents(0)
        self.seen = Probed()

    def store_all(self) -> None:
        """Once somebody lends memory. ``TimeoutError``."""
        deadline_s = time.monotonic() + FOUND_S
        while not self._store.lenders:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nobody lends memory within {FOUND_S:g} s")
            time.sleep(PAUSE_S)
        self._bytes[:] = self._right
        outcomes = self._store.put(_keys(0), SIGNATURE, self._pieces)
        if set(outcomes) != {Put.STORED}:
            raise TimeoutError(f"not all objects were stored: {set(outcomes)}")

    def put(self, seed: int) -> None:
        """Objects that are new."""
        self._bytes[:NEW] = _contents(seed)[:NEW]
        begun_s = time.monotonic()
        self._store.put(_keys(seed)[:NEW], SIGNATURE, self._pieces.of(range(NEW)), self._timeout_s)
        late_s = max(self.seen.put_late_s, self._late_s(begun_s))
        self.seen = replace(self.seen, puts=self.seen.puts + 1, put_late_s=late_s)

    def load(self) -> None:
        """As SGLang's linker, part by part."""
        self._bytes[:] = 0
        begun_s = time.monotonic()
        load = Load(self._store, _keys(0), SIGNATURE, self._pieces, self._timeout_s)
        for part in range(PIECES):
            load.begin(part, part + 1)
        came = all(load.wait(part) for part in range(PIECES))
        outcomes = load.finish() if came else []
        load.cancel()
        self._got(begun_s, outcomes)

    def get(self) -> None:
        """Whole objects."""
        self._bytes[:] = 0
        begun_s = time.monotonic()
        outcomes = self._store.get(_keys(0), SIGNATURE, self._pieces, self._timeout_s)
        self._got(begun_s, outcomes)

    def _got(self, begun_s: float, outcomes: list[Got]) -> None:
        late_s = max(self.seen.get_late_s, self._late_s(begun_s))
        wrong = sum(
            one is Got.RIGHT and not np.array_equal(self._bytes[row], self._right[row])
            for row, one in enumerate(outcomes)
        )
        self.seen = replace(
            self.seen,
            gets=self.seen.gets + 1,
            wrong=self.seen.wrong + wrong,
            get_late_s=late_s,
        )

    def _late_s(self, begun_s: float) -> float:
        return time.monotonic() - begun_s - self._timeout_s


def _keys(seed: int) -> Keys:
    return np.random.default_rng([seed, 3]).integers(0, 256, (OBJECTS, 16), np.uint8)


def _contents(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shape = (OBJECTS, PIECES * PIECE_BYTES)
    return np.random.default_rng([seed, 4]).integers(0, 256, shape, np.uint8)


def main() -> None:
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    engine = te.Config(
        status_dir=Path(spec.status_dir) if spec.status_dir else None,
        transports=spec.transports,
        connect_timeout_s=2.0,
        stall_timeout_s=1.0,
    )
    config = replace(Config.of(spec.settings), engine=engine)
    with Store(config) as store:
        probe = Probe(store, spec.timeout_s)
        probe.store_all()
        print(BEGUN, flush=True)
        seed = 1
        while not ended.is_set():
            probe.put(seed)
            probe.load()
            probe.get()
            seed += 1
            ended.wait(PAUSE_S)
    print(msgspec.json.encode(probe.seen).decode(), flush=True)


if __name__ == "__main__":
    main()
