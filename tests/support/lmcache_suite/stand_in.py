# SPDX-License-Identifier: Apache-2.0
"""The store's adapter, as LMCache's tests call their mock.

The mock takes objects anywhere in memory, has a bandwidth, and answers questions of tests. The
adapter moves objects of LMCache's own memory alone; so each task's objects are copied through
memory that is registered for the task.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvstore.lmcache.adapter import StoreL2Adapter, StoreL2AdapterConfig

__all__ = ["StandIn"]

MEMORY_BYTES = 64 << 20
GIB = 1 << 30


class Staged:
    """An object of a task, in memory that the store may use."""

    def __init__(self, one: Any, place: np.ndarray[Any, Any]) -> None:
        self.metadata = one.metadata
        self.data_ptr = place.ctypes.data
        self._nbytes = place.nbytes

    def get_size(self) -> int:
        return self._nbytes


class StandIn(StoreL2Adapter):
    """Each has a store of its own."""

    def __init__(self, config: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kv")
        self._level1 = np.zeros(4096, np.uint8)
        self._bytes_per_s = config.mock_bandwidth_gb * GIB
        #: Ends what simulates the bandwidth.
        self._ends = threading.Event()
        settings = {"memory": MEMORY_BYTES, "directory": str(Path(self._directory.name) / "s")}
        settings["linger_s"] = 0.0  # Its owner ends with it.
        super().__init__(
            StoreL2AdapterConfig.from_dict(settings),
            l1_memory_desc=SimpleNamespace(ptr=self._level1.ctypes.data, size=4096),
        )

    # -- its tasks

    def _do_store(self, task: Any) -> Any:
        keys, objects = task
        with self._staged(objects) as (staged, places):
            for one, place in zip(objects, places, strict=True):
                place[:] = _bytes_of(one).numpy()
            self._take_time(staged)
            return super()._do_store((keys, staged))

    def _do_load(self, task: Any) -> Any:
        keys, objects = task
        with self._staged(objects) as (staged, places):
            self._take_time(staged)
            found = super()._do_load((keys, staged))
            for row in found.get_indices_list():
                _bytes_of(objects[row]).copy_(torch.from_numpy(places[row]))
            return found

    @contextmanager
    def _staged(self, objects: Sequence[Any]) -> Any:
        sizes = [one.get_size() for one in objects]
        memory = np.zeros(max(sum(sizes), 1), np.uint8)
        region = self._store.register(memory)
        try:
            places = np.split(memory[: sum(sizes)], np.cumsum(sizes)[:-1])
            yield [Staged(one, place) for one, place in zip(objects, places, strict=True)], places
        finally:
            self._store.deregister(region)

    def _take_time(self, staged: Sequence[Staged]) -> None:
        self._ends.wait(sum(one.get_size() for one in staged) / self._bytes_per_s)

    def close(self) -> None:
        self._ends.set()
        super().close()
        self._directory.cleanup()

    # -- questions of tests

    def debug_get_stored_object_count(self) -> int:
        return int(self.report_status()["own_objects"])

    def debug_get_locked_key_count(self) -> int:
        return int(self.report_status()["locked_objects"])

    def debug_has_key(self, key: Any) -> bool:
        return bool(self._books.forms([key]))


def _bytes_of(one: Any) -> torch.Tensor:
    """Of an object of LMCache's; no copy."""
    raw: torch.Tensor = one.tensor.flatten().view(torch.uint8)
    return raw
