# SPDX-License-Identifier: Apache-2.0
"""Where objects are put, and how: at once or in two phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvstore.client.deadline import Deadline
from kvstore.client.handles import Handle
from kvstore.client.memory import Memory
from kvstore.client.placement import choose
from kvstore.client.pool import OWN, Pool
from kvstore.client.writing import put_at_once, put_group
from kvstore.objects.changes import Keys, fingerprint_of
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Put
from kvstore.objects.pieces import Pieces
from kvstore.owner.claims import CLAIM_OBJECTS_MAX

__all__ = ["Puts"]

Rows: TypeAlias = range | npt.NDArray[np.intp]


class Puts:
    """The puts of one process. Thread-safe."""

    def __init__(self, owners: Pool, memory: Memory, copies: int, copier: Copier) -> None:
        """``copies``: ``Config.copies``."""
        self._copier = copier
        self._owners = owners
        self._memory = memory
        self._copies = copies

    def put(self, keys: Keys, signature: bytes, source: Pieces, deadline: Deadline) -> list[Put]:
        """See ``Store.put``."""
        outcomes = [Put.UNREACHABLE] * len(keys)
        fingerprint = fingerprint_of(signature, source.object_bytes)
        places = self._owners.look_up(keys, fingerprint, self._owners.ranks_of_puts)
        if self._copies == 1 and places["copies"].tobytes().count(0) == len(keys):
            numbers = self._owners.storing()
            if len(numbers) == 1:  # The most frequent case, without a dozen calls of numpy.
                return list(self._put_at(numbers[0], keys, signature, source, deadline))
        missing = self._copies - places["copies"].astype(np.intp)
        for row in np.flatnonzero(missing <= 0).tolist():
            outcomes[row] = Put.EXISTS
        if not (missing > 0).any():
            return outcomes
        for copy, chosen, number in self._chosen(keys):
            rows = chosen[missing[chosen] > 0]
            some = source if len(rows) == len(keys) else source.of(rows)
            found = self._put_at(number, keys[rows], signature, some, deadline)
            if len(rows) == len(keys) and self._copies == 1:
                return list(found)
            for row, one in zip(rows.tolist(), found, strict=True):
                missing[row] -= one is Put.STORED
                if copy == 0 or one is Put.STORED:
                    outcomes[row] = one
        return outcomes

    def _chosen(self, keys: Keys) -> Iterator[tuple[int, npt.NDArray[np.intp], int]]:
        """Where the copies of objects go: which copy it is, their rows, an owner's number."""
        numbers = self._owners.storing()
        if len(numbers) == 1:
            yield 0, np.arange(len(keys), dtype=np.intp), numbers[0]
            return
        known = self._owners.known_as(numbers)
        own = numbers.index(OWN) if OWN in numbers else None
        chosen = np.array(numbers, np.intp)[choose(keys, *known, self._copies, own)].reshape(
            len(keys), -1
        )
        for copy in range(chosen.shape[1]):
            for number in np.unique(chosen[:, copy]).tolist():
                yield copy, np.flatnonzero(chosen[:, copy] == number), number

    def _put_at(
        self, number: int, keys: Keys, signature: bytes, source: Pieces, deadline: Deadline
    ) -> Sequence[Put]:
        """Stores objects at one owner, apart from those that it has."""
        rows: Rows = range(len(keys))
        if self._copies > 1:  # Else nobody has them.
            fingerprint = fingerprint_of(signature, source.object_bytes)
            rows = np.flatnonzero(self._owners.held_by(number, keys, fingerprint)["copies"] == 0)
        handle = self._owners.handle(number) if len(rows) else None
        if handle is not None and len(rows) == len(keys) <= CLAIM_OBJECTS_MAX:
            return self._put_group(handle, keys, signature, source, deadline)
        rows = np.asarray(rows, np.intp)
        outcomes = [Put.EXISTS] * len(keys)
        for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
            some = rows[first : first + CLAIM_OBJECTS_MAX]
            found: Sequence[Put] = [Put.UNREACHABLE] * len(some)
            if handle is not None:
                found = self._put_group(handle, keys[some], signature, source.of(some), deadline)
            for row, one in zip(some.tolist(), found, strict=True):
                outcomes[row] = one
        return outcomes

    def _put_group(
        self, handle: Handle, keys: Keys, signature: bytes, source: Pieces, deadline: Deadline
    ) -> Sequence[Put]:
        if deadline.is_over:
            return [Put.TIMED_OUT] * len(keys)
        nbytes = len(keys) * source.object_bytes
        is_readable = self._memory.is_readable(source)
        if nbytes <= handle.take_bytes_max and is_readable:
            return put_at_once(handle, keys, signature, source, deadline)
        copier = self._copier if is_readable else None
        return put_group(handle, keys, signature, source, deadline, copier)
