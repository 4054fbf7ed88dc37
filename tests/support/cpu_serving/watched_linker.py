# SPDX-License-Identifier: Apache-2.0
"""The store's linker, which says how long its puts and loads took beyond their deadlines, and which
may be slow on one rank. SGLang makes it: servers find it by their `PYTHONPATH`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Final

import msgspec
from sglang.srt.runtime_context import get_parallel

from cpu_serving.store_figures import FIGURES, SLOW_RANK, Figures, SlowRank
from kvstore.client.deadline import Deadline
from sglang_mooncake.sglang.store import linker

__all__ = ["WatchedLinker"]

NO_SLOW_RANK: Final = SlowRank(rank=-1)


class WatchedLinker(linker.StoreLinker):
    """One rank's part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        folder, slow = Path(os.environ[FIGURES]), os.environ.get(SLOW_RANK)
        self._file = folder / f"{os.getpid()}.json"
        self._figures = Figures()
        self._writing = threading.Lock()
        told = NO_SLOW_RANK if slow is None else msgspec.json.decode(slow, type=SlowRank)
        self._slow = told if told.rank == int(get_parallel().attn_tp_rank) else NO_SLOW_RANK
        if slow is not None:  # On all ranks: what one drops, the others do not.
            linker.OFFLOAD_WAIT_MAX_S = told.wait_max_s  # type: ignore[misc]
        super().__init__(*args, **kwargs)

    def _load(self, batch: Any) -> None:
        time.sleep(self._slow.load_s)
        begun_s = time.monotonic()
        try:
            super()._load(batch)
            self._figures.loads += 1
            self._figures.pages += sum(
                len(pages.keys) for one in batch.loads for pages in one.pages.values()
            )
        except LookupError:
            self._figures.failed_loads += 1
            raise
        finally:
            late_s = time.monotonic() - begun_s - self._options.load_timeout_s
            self._figures.load_late_s = max(self._figures.load_late_s, late_s)
            self._write()

    def _offload(self, offload: Any, deadline: Deadline) -> bool:
        time.sleep(self._slow.offload_s)
        left_s = deadline.left_s
        begun_s = time.monotonic()
        stored = bool(super()._offload(offload, deadline))
        late_s = time.monotonic() - begun_s - left_s
        self._figures.offloads += 1
        self._figures.offload_late_s = max(self._figures.offload_late_s, late_s)
        self._write()
        return stored

    def _tell_dropped(self, is_dropped: bool) -> None:
        super()._tell_dropped(is_dropped)
        self._figures.dropped = self._offloads_dropped
        self._write()

    def _write(self) -> None:
        """Whoever reads it finds all of it. Loads and offloads are in two threads."""
        with self._writing:
            scratch = self._file.with_suffix(".new")
            scratch.write_bytes(msgspec.json.encode(self._figures))
            scratch.replace(self._file)
