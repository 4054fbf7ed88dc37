# SPDX-License-Identifier: Apache-2.0
"""Reads objects part by part, for those who use the first pieces while the others are on their way
(the layers of a model).

A part that was handed over is in use: it cannot be repaired any more. So a part is handed over only
after the slots' headers were read *behind* it, and were right. What fails before that is read anew
from another copy, all parts of it; what fails later fails its object.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvstore.client.reading import cancel
from kvstore.objects.changes import Keys
from kvstore.objects.outcomes import Got
from kvstore.objects.pieces import Pieces
from kvstore.store import Store

__all__ = ["Load"]


class Load:
    """One batch of objects, all of which are needed. For one thread.

    ``begin`` every part in order, ``wait`` for each, which hands it over, then ``finish``; in any
    case ``cancel`` at the end. The destination is being written until then.
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
        self._outcomes, self._groups = store.gets.locate(keys, signature, destination)
        found = {row for group in self._groups for row in group.rows}
        #: What one look-up has not found, or an owner that could not be reached.
        self._left = [row for row in range(len(keys)) if row not in found]

    def begin(self, first: int, end: int) -> None:
        """Begins to read some pieces of all objects. ``te.BoundsError`` if memory of them is not
        registered."""
        offset = int(self._destination.nbytes[:first].sum())
        part = self._destination.part(first, end)
        for group in self._groups:
            group.begin(part.of(group.rows), offset)

    def wait(self, part: int) -> bool:
        """Waits for a part by its number, in the order of ``begin``. Whether every object's part is
        there, and right but for its checksum; once it was False it stays so."""
        rows, self._left = self._left, []
        for group in list(self._groups):
            group.wait_for(part, self._deadline_s)
            if group.failed is None:
                self._store.gets.check(group, self._deadline_s)
            if group.failed is not None:
                self._store.gets.finish(group, self._destination, self._outcomes, self._deadline_s)
                self._groups.remove(group)
                rows += group.rows
        self._again(rows)
        return self._is_right(row for group in self._groups for row in group.rows)

    def finish(self) -> list[Got]:
        """After every part was waited for, or one was not right: an outcome for each object.
        Nothing lands any more."""
        if not self._is_right(row for group in self._groups for row in group.rows):
            self.cancel()
        for group in self._groups:
            # With the headers that `wait` has found for the last part.
            self._store.gets.accept(group, self._destination, self._outcomes)
        self._groups = []
        self._store.conclude_gets(
            self._keys, self._signature, self._outcomes, self._destination.object_bytes
        )
        return self._outcomes

    def cancel(self) -> None:
        """Ends all reads; nothing lands any more. Without effect after ``finish``. Raises
        ``StillLanding`` as ``Store.get`` does."""
        for group in self._groups:
            group.fail(Got.TIMED_OUT, "cancelled")
        cancel(self._groups)
        self._groups = []

    def _is_right(self, open_rows: Iterable[int]) -> bool:
        """Whether all rows are right, apart from those whose group is still under way."""
        still_open = set(open_rows)
        return all(
            one is Got.RIGHT for row, one in enumerate(self._outcomes) if row not in still_open
        )

    def _again(self, rows: Sequence[int]) -> None:
        """Nothing of these rows is under way."""
        if not rows or time.monotonic() >= self._deadline_s:
            return
        # Counted by `finish`, with all others.
        found = self._store.gets.get(
            self._keys[list(rows)], self._signature, self._destination.of(rows), self._deadline_s
        )
        for row, one in zip(rows, found, strict=True):
            if one is not Got.MISSING:  # Why it was not there before says more.
                self._outcomes[row] = one
