# SPDX-License-Identifier: Apache-2.0
"""LMCache's second level on the store: chunks go from its host memory into the store, and back.

    lmcache server --l1-size-gb 20 --l2-adapter '{"type": "plugin",
        "module_path": "kvstore.lmcache.adapter", "class_name": "StoreL2Adapter",
        "adapter_params": {"memory": "16GiB"}}'

Written against LMCache 0.5.6 (`v1/distributed/l2_adapters/base.py`). Its two controller threads
call everything here but the two threads that store and load.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self, TypeAlias

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

from kvstore.config import Config
from kvstore.lmcache.accounts import ObjectSpec
from kvstore.lmcache.books import Books
from kvstore.lmcache.lookups import LookUps
from kvstore.lmcache.names import Layout, keys_of_objects, rows_by, signature_of
from kvstore.lmcache.tasks import Lane
from kvstore.networking import config_of
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.store import Store, stopped
from kvstore.values import typed

__all__ = ["StoreL2Adapter", "StoreL2AdapterConfig"]

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0
STORED: Final = {Put.STORED, Put.EXISTS, Put.BEING_STORED}
AGAIN_S: Final = 0.02
"""Between two tries to store what found no free slot: the owner evicts meanwhile."""
VAIN_TRIES_MAX: Final = 10
"""Tries of which none has stored anything."""
CLOSE_TIMEOUT_S: Final = 30.0
"""Beside a task's time."""

Objects: TypeAlias = tuple[Sequence[Any], Sequence[Any]]
"""Of a task: LMCache's keys, and its memory objects."""
Rows: TypeAlias = list[int]


class StoreL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """The settings in ``adapter_params``: those of ``kvstore.Config``, and these."""

    def __init__(self, store: Config, weights: str, timeout_s: float) -> None:
        #: Of the store's part in this process.
        self.store = store
        #: Tells weights apart that LMCache knows by one model name.
        self.weights = weights
        #: A task that takes longer has failed.
        self.timeout_s = timeout_s

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """``ValueError`` names what is unknown or wrong."""
        rest = dict(d)
        weights = typed("weights", rest.pop("weights", ""), "str")
        timeout_s = typed("timeout_s", rest.pop("timeout_s", TIMEOUT_S), "float")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
        return cls(config_of(rest, ("weights", "timeout_s")), weights, timeout_s)

    @classmethod
    def help(cls) -> str:
        """For LMCache's list of adapters."""
        return (
            "adapter_params of the store:\n"
            '- memory: what the owner of this host lends: "16GiB", or bytes (default 0)\n'
            "- weights: a text that tells weights of one model name apart\n"
            f"- timeout_s: a task that takes longer has failed (default {TIMEOUT_S:g})\n"
            "- index, secret_file, directory, copies, ...: see docs/kvstore.md"
        )


class StoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """LMCache's objects in the store. Thread-safe.

    Objects are written out of LMCache's own memory and read straight into it. The store evicts by
    itself: an object that could not be locked, and is evicted between look-up and load, is told as
    not loaded.
    """

    def __init__(self, config: StoreL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        """Raises ``ValueError`` without LMCache's memory, and what ``Store`` raises."""
        lent = config.store
        super().__init__(lent.memory + lent.disk_size + lent.objects_size)
        if l1_memory_desc is None or not l1_memory_desc.ptr or l1_memory_desc.size <= 0:
            raise ValueError(
                "the store reads into LMCache's memory, which must be one range, and was told of"
                f" {l1_memory_desc}; use an L1 in ordinary host memory"
            )
        self._memory_bytes = lent.memory
        self._weights, self._timeout_s = config.weights, config.timeout_s
        self._numbers = itertools.count()
        self._closing = threading.Event()
        with contextlib.ExitStack() as undo:
            self._store = undo.enter_context(Store(config.store))
            self._store.register(_bytes_at(l1_memory_desc.ptr, l1_memory_desc.size))
            self._stores = Lane("store", self._do_store, lambda _: L2StoreResult(False, 0))
            undo.callback(self._stores.close, config.timeout_s + CLOSE_TIMEOUT_S)
            self._loads = Lane("load", self._do_load, lambda task: Bitmap(len(task[0])))
            undo.callback(self._loads.close, config.timeout_s + CLOSE_TIMEOUT_S)
            self._books = Books(
                self._store,
                partial(self._tell, self._notify_keys_stored),
                partial(self._tell, self._notify_keys_deleted),
            )
            self._lookups = LookUps(self._store, self._weights, self._books.specs, self._numbers)
            undo.callback(self._lookups.close, config.timeout_s + CLOSE_TIMEOUT_S)
            undo.callback(self._closing.set)
            self._undo = undo.pop_all()

    # -- what LMCache's controllers wait for

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return self._stores.results.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when there are answers to look-ups."""
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return self._loads.results.event_fd

    # -- look-ups

    def submit_lookup_and_lock_task(
        self, keys: Sequence[Any], group_layout_descs: Mapping[int, Any]
    ) -> int:
        """Queues it. What is found is locked if it can be: it is not evicted before LMCache unlocks
        it. Without a layout (LMCache's bench gives none) an object of any size is found; its load
        tells whether it is the one that was wanted."""
        return self._lookups.submit(keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """A bitmap of the objects that were found, once; None else."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: Sequence[Any]) -> None:
        """Takes back one lock of each key that has one. Never blocks."""
        self._lookups.unlock(keys)

    # -- stores

    def submit_store_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Queues it; with too many that wait, it fails at once."""
        task = next(self._numbers)
        self._stores.submit(task, (keys, objects))
        return task

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """Each ended store, once: how many bytes went into the store, or that it has failed. It has
        failed unless all of its objects are there."""
        return self._stores.results.take_all()

    def _do_store(self, task: Objects) -> Any:
        deadline_s = time.monotonic() + self._timeout_s
        keys, objects = task
        nbytes = 0
        lost: Counter[str] = Counter()
        for rows, signature, pieces in self._batches(keys, objects):
            digests = keys_of_objects([keys[row] for row in rows])
            outcomes = self._put(digests, signature, pieces, deadline_s)
            nbytes += outcomes.count(Put.STORED) * pieces.object_bytes
            lost.update(one.value for one in outcomes if one not in STORED)
            there = [at for at, one in enumerate(outcomes) if one in (Put.STORED, Put.EXISTS)]
            self._books.add(
                [keys[rows[at]] for at in there],
                digests[there],
                ObjectSpec(signature, pieces.object_bytes),
                [outcomes[at] is Put.STORED for at in there],
            )
        if lost:
            logger.warning("of %d objects some were not stored: %s", len(keys), dict(lost))
        return L2StoreResult(not lost, nbytes)

    def _put(self, digests: Keys, signature: bytes, pieces: Pieces, deadline_s: float) -> list[Put]:
        """Outcomes of one batch. What finds no free slot is tried again while the owner evicts."""
        outcomes = [Put.TIMED_OUT] * len(digests)
        left = list(range(len(digests)))
        vain = 0
        while left and vain < VAIN_TRIES_MAX and (left_s := deadline_s - time.monotonic()) > 0:
            if vain and self._closing.wait(min(AGAIN_S, left_s)):
                break
            found = self._store.put(digests[left], signature, pieces.of(left), left_s)
            for row, one in zip(left, found, strict=True):
                outcomes[row] = one
            full = [row for row in left if outcomes[row] is Put.NO_SPACE]
            vain = vain + 1 if len(full) == len(left) else 1
            left = full
        return outcomes

    # -- loads

    def submit_load_task(self, keys: Sequence[Any], objects: Sequence[Any]) -> int:
        """Queues it; with too many that wait, it fails at once."""
        task = next(self._numbers)
        self._loads.submit(task, (keys, objects))
        return task

    def query_load_result(self, task_id: int) -> Any:
        """A bitmap of the objects that were loaded, once; None else. What was not loaded may have
        any bytes; nothing lands there any more."""
        return self._loads.results.take(task_id)

    def _do_load(self, task: Objects) -> Any:
        deadline_s = time.monotonic() + self._timeout_s
        keys, objects = task
        loaded: Rows = []
        lost: Counter[str] = Counter()
        for rows, signature, pieces in self._batches(keys, objects):
            digests = keys_of_objects([keys[row] for row in rows])
            left_s = max(deadline_s - time.monotonic(), 0.0)
            with stopped():  # LMCache uses the memory again as soon as the load has ended.
                outcomes = self._store.get(digests, signature, pieces, left_s)
            loaded += [row for row, one in zip(rows, outcomes, strict=True) if one is Got.RIGHT]
            lost.update(one.value for one in outcomes if one is not Got.RIGHT)
        if lost:
            logger.warning("of %d objects some were not loaded: %s", len(keys), dict(lost))
        if loaded:
            self._tell(self._notify_keys_accessed, [keys[row] for row in loaded])
        found = Bitmap(len(keys))
        found.batched_set(loaded)
        return found

    # -- both

    def _batches(
        self, keys: Sequence[Any], objects: Sequence[Any]
    ) -> Iterator[tuple[Rows, bytes, Pieces]]:
        """The rows of a task by layout and size: their signature, and where they lie."""
        if len(keys) != len(objects):
            raise ValueError(f"{len(keys)} keys, but {len(objects)} objects")
        for (layout, nbytes), rows in rows_by(objects, _layout_and_size):
            addresses = np.array([objects[row].data_ptr for row in rows], np.uint64)
            yield rows, signature_of(self._weights, layout), Pieces.whole(addresses, nbytes)

    def _tell(self, listeners: Callable[..., None], *what: Any) -> None:
        """LMCache's listeners; what they raise does not undo what was done."""
        try:
            listeners(*what)
        except Exception:
            logger.exception("a listener of LMCache failed")

    # -- how it is

    def get_usage(self) -> AdapterUsage:
        """The bytes of what this server has stored and is still there, by ``cache_salt``, and how
        much it lends. LMCache keeps its quotas by that."""
        self._books.see()
        return super().get_usage()

    def delete(self, keys: Sequence[Any]) -> None:
        """Removes objects that this server has stored, for all servers. Those that it has locked
        stay."""
        locked = self._lookups.locked(keys)
        self._books.remove([key for key in keys if key not in locked])

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """The objects that this server has stored, of one model or of all, in the order in which
        they came. ``ValueError`` for a ``page_size`` or a ``cursor`` that cannot be."""
        if page_size <= 0:
            raise ValueError(f"page_size={page_size} must be positive")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise ValueError(f"cursor={cursor!r} is none that an earlier page has named")
        some, following = self._books.page(model_name, page_size, int(cursor or 0))
        entries = (KeyEntry(key.to_encoded_object_key(), nbytes) for key, nbytes in some)
        return KeyListPage(tuple(entries), None if following is None else str(following))

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page."""
        now = self._store.status()
        usable = self._store.lenders
        return {
            "is_healthy": bool(usable),
            "type": type(self).__name__,
            "reason": "" if usable else "no process lends memory to the store",
            "memory_bytes": self._memory_bytes,
            "usable_owners": usable,
            "known_objects": len(self._store),
            "own_objects": len(self._books),
            "locked_objects": self._lookups.count(),
            "gets": now.gets,
            "puts": now.puts,
            "lookups": now.lookups,
        }

    def close(self) -> None:
        """Waits for what is under way, a task's time at most, and gives the lent memory back. After
        it nothing reads or writes LMCache's memory. Idempotent."""
        self._undo.close()


def _bytes_at(address: int, nbytes: int) -> Any:
    """LMCache's memory, which it keeps until the adapter is closed. No copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _layout_and_size(one: Any) -> tuple[Layout, int]:
    known = one.metadata
    layout = Layout.of(known.shapes or [known.shape], known.dtypes or [known.dtype])
    return layout, one.get_size()
