# SPDX-License-Identifier: Apache-2.0
"""What this process has stored for LMCache, told to it: what was stored, and what is gone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from kvstore.lmcache.accounts import Account, Accounts, ObjectSpec
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Removed
from kvstore.store import Store

__all__ = ["Books"]

logger = logging.getLogger(__name__)

SETTLED_S: Final = 10.0
"""After a put, another process's owner may take that long to announce an object here."""
SEEN_AT_ONCE: Final = 16_384
"""Objects that one question for the use looks at: some milliseconds."""
SEEN_BESIDE: Final = 64
"""Objects that each store looks at, besides two for each that it has stored: so those that are gone
are forgotten faster than others come."""

Told: TypeAlias = Callable[[list[Any], list[int]], None]
"""Keys and their sizes in bytes."""


class Books:
    """Thread-safe. LMCache hears of one thing after the other, in the order in which it was."""

    def __init__(self, store: Store, stored: Told, gone: Told) -> None:
        """``stored`` and ``gone`` are told while nothing else is written here."""
        self._store = store
        self._stored, self._gone = stored, gone
        #: Of those who are told, one may ask for something here.
        self._lock = threading.RLock()
        self._accounts = Accounts()

    def specs(self, keys: Sequence[Any]) -> dict[Any, ObjectSpec]:
        """What objects were stored here with."""
        with self._lock:
            return {key: one.spec for key, one in self._accounts.of(keys).items()}

    def add(
        self, keys: Sequence[Any], digests: Keys, spec: ObjectSpec, is_written: Sequence[bool]
    ) -> None:
        """These objects are in the store.

        is_written: which of them were written just now. One that lay there before is told if it was
            not known here: another server has stored it, or this one before it was restarted.
        """
        now_s = time.monotonic()
        told: list[Any] = []
        again: dict[Any, Account] = {}
        with self._lock:
            for key, digest, written in zip(keys, digests, is_written, strict=True):
                before = self._accounts.add(key, digest.tobytes(), spec, now_s)
                if before is not None and written:  # The store had evicted it.
                    again[key] = before
                if before is None or written:
                    told.append(key)
            self._tell(self._gone, {key: one.spec.nbytes for key, one in again.items()})
            self._tell(self._stored, dict.fromkeys(told, spec.nbytes))
        self.see(2 * len(told) + SEEN_BESIDE)

    def remove(self, keys: Sequence[Any]) -> None:
        """Removes those of these objects from the store that were stored here."""
        with self._lock:
            known = self._accounts.of(keys)
        if len(known) < len(keys):
            logger.info(
                "%d of %d objects are not deleted: this server has not stored them",
                len(keys) - len(known),
                len(keys),
            )
        removed: dict[Any, Account] = {}
        for spec, some in _by_spec(known).items():
            digests = _digests(some)
            # An owner that has not answered may have kept some: they are seen to be gone later.
            if Removed.UNREACHABLE not in self._store.remove(digests, spec.signature):
                removed |= some
        self._drop(removed)

    def see(self, count: int = SEEN_AT_ONCE) -> None:
        """Looks, in turn, whether some objects are still in the store, which evicts by itself."""
        with self._lock:
            some = self._accounts.next_to_see(count, time.monotonic() - SETTLED_S)
        gone: dict[Any, Account] = {}
        for spec, part in _by_spec(some).items():
            held = self._store.remembered(_digests(part), spec.signature, spec.nbytes)
            gone |= {key: part[key] for key, is_here in zip(part, held, strict=True) if not is_here}
        self._drop(gone)

    def page(
        self, model_name: str | None, count: int, after: int
    ) -> tuple[list[tuple[Any, int]], int | None]:
        """See ``Accounts.page``."""
        with self._lock:
            return self._accounts.page(model_name, count, after)

    def __len__(self) -> int:
        return len(self._accounts)

    def _drop(self, gone: Mapping[Any, Account]) -> None:
        if gone:
            with self._lock:
                dropped = self._accounts.drop(gone)
                self._tell(self._gone, {key: one.spec.nbytes for key, one in dropped.items()})

    def _tell(self, told: Told, sizes: Mapping[Any, int]) -> None:
        if sizes:
            told(list(sizes), list(sizes.values()))


def _by_spec(accounts: Mapping[Any, Account]) -> dict[ObjectSpec, dict[Any, Account]]:
    found: dict[ObjectSpec, dict[Any, Account]] = {}
    for key, one in accounts.items():
        found.setdefault(one.spec, {})[key] = one
    return found


def _digests(accounts: Mapping[Any, Account]) -> Keys:
    raw = b"".join(one.digest for one in accounts.values())
    return np.frombuffer(raw, np.uint8).reshape(-1, 16)
