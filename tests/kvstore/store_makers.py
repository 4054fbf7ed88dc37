# SPDX-License-Identifier: Apache-2.0
"""Stores, keys and objects for tests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import te
from kvstore.config import Config
from kvstore.objects.changes import Keys
from kvstore.objects.pieces import Pieces
from kvstore.objects.signature import Signature
from kvstore.store import Store

TIMEOUT_S = 60.0
SIGNATURE = Signature(
    weights="tiny", dtype="bfloat16", page_size=16, layers=(0, 4), heads=(0, 2), layout="test/1"
)
SIG = SIGNATURE.digest


def keys(count: int, seed: int = 0) -> Keys:
    """Random ones; the same for the same seed."""
    return np.random.default_rng([seed, 7]).integers(0, 256, (count, 16), np.uint8)


def contents(count: int, nbytes: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Objects, shape (count, nbytes), no two alike."""
    return np.random.default_rng([seed, 8]).integers(0, 256, (count, nbytes), np.uint8)


def until(condition: Callable[[], Any], what: str = "") -> None:
    """Waits for it."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain: {what}"
        time.sleep(0.002)


@contextmanager
def without_more_threads() -> Iterator[None]:
    """As in a container that has reached its limit."""

    def cannot_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        yield


def descriptors() -> set[str]:
    """Those that this process has open, but for the one that lists them."""
    return {path.name for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}


def engine(**more: Any) -> te.Config:
    """One that leaves this machine's own directory alone, and waits for peers on a busy one."""
    more = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S} | more
    return te.Config(status_dir=None, **more)


def settings(**more: Any) -> dict[str, Any]:
    """As ``engine``, of a store."""
    return {"engine": engine(), "request_timeout_s": TIMEOUT_S} | more


def config(directory: Path, memory: int = 0, **more: Any) -> Config:
    return Config(directory=directory, memory=memory, **settings(**more))


@contextmanager
def impatient(store: Store) -> Iterator[None]:
    """A store that soon gives up owners that do not answer, for a while."""
    owners = store._owners
    patient = owners._config
    store._config = owners._config = replace(patient, request_timeout_s=0.5)
    owners._following._timeout_s = 0.5
    try:
        yield
    finally:
        store._config = owners._config = patient
        owners._following._timeout_s = patient.request_timeout_s


class Room:
    """Registered memory for some objects."""

    def __init__(self, store: Store, count: int, nbytes: int) -> None:
        self.bytes = np.zeros((count, nbytes), np.uint8)
        self.region = store.register(self.bytes)

    @property
    def pieces(self) -> Pieces:
        """One piece for each object."""
        count, nbytes = self.bytes.shape
        start = self.bytes.ctypes.data
        return Pieces.whole(start + np.arange(count, dtype=np.uint64) * np.uint64(nbytes), nbytes)

    def split(self, *sizes: int) -> Pieces:
        """Several pieces for each object."""
        offsets = np.cumsum([0, *sizes[:-1]])
        return Pieces(self.pieces.addresses + offsets.astype(np.uint64), np.array(sizes))


@contextmanager
def deaf(store: Store) -> Iterator[None]:
    """A store whose thread hears nothing of others for a while."""
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        end.wait(TIMEOUT_S)

    store._owners._following.loop.call(hold)
    assert begun.wait(TIMEOUT_S)
    try:
        yield
    finally:
        end.set()
