# SPDX-License-Identifier: Apache-2.0
"""Reads objects part by part, for those who use the first pieces while the others are on their way
(the layers of a model)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.changes import Keys
from kvstore.outcomes import Got
from kvstore.pieces import Pieces
from kvstore.reading import Group
from kvstore.store import Store

__all__ = ["Load"]


class Load:
    """One batch of objects, all of which are needed. For one thread.

    ``begin`` every part in order, ``wait`` for each, then ``finish``: the parts are only *likely*
    to be right before that. Between ``begin`` and ``finish`` the destination is being written.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        timeout_s: float,
    ) -> None:
        """Looks the objects up. ``destination`` has all pieces of each."""
        self._store = store
        self._keys = keys
        self._signature = signature
        self._destination = destination
        self._deadline_s = time.monotonic() + timeout_s
        self._outcomes, self._groups = store.locate(keys, signature, destination)

    def begin(self, first: int, end: int) -> None:
        """Begins to read some pieces of all objects. ``te.BoundsError`` if memory of them is not
        registered."""
        offset = int(self._destination.nbytes[:first].sum())
        part = self._destination.part(first, end)
        for group in self._groups:
            group.begin(part.of(group.rows), offset)

    def wait(self, part: int) -> None:
        """Waits for a part by its number, in the order of ``begin``. A read that fails is done
        again from elsewhere, all parts at once, if another copy is known."""
        for group in self._groups:
            group.wait_for(part, self._deadline_s)
        self._settle([group for group in self._groups if group.failed is not None])

    def finish(self) -> list[Got]:
        """After all parts: one outcome for each object. Nothing lands any more. What has moved
        meanwhile is read again if it is still known."""
        for group in self._groups:
            self._store.finish(group, self._destination, self._outcomes, self._deadline_s)
        self._groups = []
        self._store.count_gets(self._outcomes, self._destination.object_bytes)
        self._again([row for row, one in enumerate(self._outcomes) if one is not Got.RIGHT])
        return self._outcomes

    def cancel(self) -> None:
        """Ends all reads; nothing lands any more."""
        for group in self._groups:
            group.fail(Got.TIMED_OUT, "cancelled")
            group.wait(self._deadline_s)
        self._groups = []

    def _settle(self, failed: Sequence[Group]) -> None:
        rows: list[int] = []
        for group in failed:
            self._groups.remove(group)
            self._store.finish(group, self._destination, self._outcomes, self._deadline_s)
            rows += group.rows
        self._again(rows)

    def _again(self, rows: Sequence[int]) -> None:
        left_s = self._deadline_s - time.monotonic()
        if not rows or left_s <= 0:
            return
        found = self._store.get(
            self._keys[list(rows)], self._signature, self._destination.of(rows), left_s
        )
        for row, one in zip(rows, found, strict=True):
            self._outcomes[row] = one
