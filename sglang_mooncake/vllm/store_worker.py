# SPDX-License-Identifier: Apache-2.0
"""The worker's part of the store connector: pages go out of vLLM's blocks and into them, while the
model computes others. Knows the store, and nothing of vLLM."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from kvstore.client.deadline import Deadline
from kvstore.client.placement import share_of
from kvstore.objects.outcomes import Got, Put
from kvstore.store import Store, stopped
from sglang_mooncake.vllm.lane import Lane
from sglang_mooncake.vllm.page_map import PageMap
from sglang_mooncake.vllm.requests import Work

__all__ = ["Ready", "StoreWorker"]

logger = logging.getLogger(__name__)

SAVES_MAX: Final = 1024
LOADS_MAX: Final = 1024
"""Pieces of work that wait. Of more, pages are not stored, and are computed instead of loaded."""
SAVE_TIMEOUT_S: Final = 10.0
CLOSE_TIMEOUT_S: Final = 10.0
"""Beside the time of a load or of a save."""
STORED: Final = {Put.STORED, Put.EXISTS, Put.BEING_STORED}


class Ready(Protocol):
    """An event of the device's stream: what was queued there before it is done."""

    def synchronize(self) -> None: ...


class StoreWorker:
    """One rank's pages. The model runner's thread calls everything here; it waits for nothing but
    in ``preempted`` and ``close``."""

    def __init__(
        self,
        store: Store,
        pages: PageMap,
        signature: bytes,
        load_timeout_s: float,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """``pages`` lie in memory that is registered with the store. ``share``: which part of them
        this rank stores, and of how many."""
        self._share = share
        self._store, self._pages, self._signature = store, pages, signature
        self._load_timeout_s = load_timeout_s
        self._lock = threading.Lock()
        #: Requests whose loads have ended, and the blocks of theirs that did not come.
        self._loaded: dict[str, list[int]] = {}
        self._failed: set[int] = set()
        #: Requests of which pages are or were saved, and which of them vLLM has finished.
        self._saving: set[str] = set()
        self._finished: set[str] = set()
        #: The request of which pages are being saved, and until when; those that are preempted now.
        self._save_under_way: tuple[str, Deadline] | None = None
        self._preempted: set[str] = set()
        self._loads: Lane[Work] = Lane("load", self._load, LOADS_MAX)
        self._saves: Lane[tuple[Work, Sequence[Ready]]] = Lane("save", self._save, SAVES_MAX)

    def load(self, work: Work) -> None:
        """Into blocks that nobody reads before ``take_loaded`` names the request."""
        if not self._loads.submit(work.request_id, work):
            logger.warning(
                "request %s: %d loads wait already; its pages are computed",
                work.request_id,
                LOADS_MAX,
            )
            self._ended(work, work.blocks)

    def save(self, work: Work, ready: Sequence[Ready]) -> None:
        """Out of blocks that keep what they hold until ``take_saved`` names the request, or
        ``preempted`` is called. Nothing is read before ``ready`` has happened."""
        with self._lock:
            self._saving.add(work.request_id)
        if not self._saves.submit(work.request_id, (work, ready)):
            logger.warning(
                "request %s: %d saves wait already; its pages are not stored",
                work.request_id,
                SAVES_MAX,
            )

    def preempted(self, request_ids: Collection[str]) -> None:
        """vLLM uses the blocks of these requests again. Waits for a save that reads them: about a
        millisecond. If it goes on all the same, what it reads from now on is not stored."""
        with self._lock:
            self._preempted = set(request_ids)
            if self._save_under_way is not None and self._save_under_way[0] in request_ids:
                self._save_under_way[1].end()
        timeout_s = SAVE_TIMEOUT_S + CLOSE_TIMEOUT_S
        if not self._saves.drop(request_ids, timeout_s):
            logger.error(
                "pages of preempted requests are being read for the store since %g s; their blocks"
                " are used again now, and what was read is not stored",
                timeout_s,
            )
        with self._lock:
            self._preempted = set()

    def take_saved(self, finished: Collection[str]) -> set[str]:
        """Requests that vLLM has finished (``finished``: since the last call), and whose blocks are
        not read any more. Each is told once."""
        with self._lock:
            self._finished |= self._saving.intersection(finished)
            waiting = set(self._finished)
        saved = {one for one in waiting if not self._saves.left(one)}
        with self._lock:
            self._finished -= saved
            self._saving -= saved
        return saved

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended: nothing lands in their blocks any more. Each is told
        once."""
        with self._lock:
            loaded, self._loaded = self._loaded, {}
            for failed in loaded.values():
                self._failed.update(failed)
        return set(loaded)

    def take_failed(self) -> set[int]:
        """Blocks of the requests that ``take_loaded`` has told of, which may have any bytes."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        """Nothing reads or writes the KV cache after this. Raises ``TimeoutError`` if something
        goes on all the same."""
        self._loads.close(self._load_timeout_s + CLOSE_TIMEOUT_S)
        self._saves.close(SAVE_TIMEOUT_S + CLOSE_TIMEOUT_S)

    # -- in the threads

    def _load(self, work: Work) -> None:
        failed: Sequence[int] = work.blocks
        try:
            with stopped():  # Else vLLM would use the blocks again.
                failed = self._get(work)
        finally:
            self._ended(work, failed)

    def _get(self, work: Work) -> Sequence[int]:
        """The blocks whose page did not come."""
        pieces = self._pages.pieces(work.blocks)
        outcomes = self._store.get(work.keys, self._signature, pieces, self._load_timeout_s)
        wrong = [row for row, one in enumerate(outcomes) if one is not Got.RIGHT]
        if wrong:
            logger.warning(
                "request %s: of %d pages some did not come and are computed: %s",
                work.request_id,
                len(outcomes),
                dict(Counter(outcomes[row].value for row in wrong)),
            )
        return [work.blocks[row] for row in wrong]

    def _ended(self, work: Work, failed: Sequence[int]) -> None:
        with self._lock:
            self._loaded[work.request_id] = list(failed)

    def _save(self, save: tuple[Work, Sequence[Ready]]) -> None:
        work, ready = save
        deadline = Deadline(SAVE_TIMEOUT_S)
        with self._lock:
            if work.request_id in self._preempted:
                deadline.end()
            self._save_under_way = work.request_id, deadline
        for event in ready:
            event.synchronize()
        mine = share_of(work.keys, *self._share)
        pieces = self._pages.pieces([work.blocks[row] for row in mine.tolist()])
        outcomes = self._store.put(work.keys[mine], self._signature, pieces, deadline=deadline)
        lost = Counter(one.value for one in outcomes if one not in STORED)
        if lost:
            logger.warning(
                "request %s: of %d pages some were not stored: %s",
                work.request_id,
                len(outcomes),
                dict(lost),
            )
