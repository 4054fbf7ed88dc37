# SPDX-License-Identifier: Apache-2.0
"""The memory that a client reads into and stores from, as the processor sees it."""

from __future__ import annotations

import bisect
from typing import Any, Final

import numpy as np
import xxhash

import te
from kvstore.pieces import Pieces

__all__ = ["Memory"]


class Memory:
    """Registered ranges and, where the processor can read them, their bytes."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine: Final = engine
        self._starts: list[int] = []
        self._ranges: list[tuple[te.Region, memoryview | None]] = []

    def register(self, memory: Any, nbytes: int | None = None) -> te.Region:
        """See ``te.Engine.register``; peers get no rights. Memory behind a bare address is not
        compared with checksums: give a buffer instead where there is one."""
        region = self._engine.register(memory, nbytes, remote="none")
        view = None if isinstance(memory, int) else memoryview(memory).cast("B")[: region.nbytes]
        at = bisect.bisect(self._starts, region.address)
        self._starts.insert(at, region.address)
        self._ranges.insert(at, (region, view))
        return region

    def deregister(self, region: te.Region) -> None:
        """See ``te.Engine.deregister``."""
        at = bisect.bisect(self._starts, region.address) - 1
        if at < 0 or self._ranges[at][0] is not region:
            raise te.RegistrationError(f"{region!r} was not registered with the store")
        self._engine.deregister(region)
        del self._starts[at], self._ranges[at]

    def gathered(self, pieces: Pieces) -> bytes:
        """A copy of the bytes of objects, one behind the other. The processor can read them: see
        ``is_readable``."""
        parts = []
        for row in pieces.addresses.tolist():
            for address, nbytes in zip(row, pieces.nbytes.tolist(), strict=True):
                region, view = self._ranges[bisect.bisect(self._starts, address) - 1]
                assert view is not None
                start = address - region.address
                parts.append(view[start : start + nbytes])
        return b"".join(parts)

    def is_readable(self, pieces: Pieces) -> bool:
        """Whether the processor can read all of these."""
        known = [(one.address, one.nbytes) for one, view in self._ranges if view is not None]
        starts = np.array([start for start, _ in known], np.uint64)
        ends = starts + np.array([nbytes for _, nbytes in known], np.uint64)
        at = np.searchsorted(starts, pieces.addresses, side="right")
        if not at.all():
            return False
        return bool((pieces.addresses + pieces.nbytes <= ends[at - 1]).all())

    def checksum(self, pieces: Pieces, row: int) -> int | None:
        """xxh3-64 of one object's pieces; None if the processor cannot read all of them."""
        digest = xxhash.xxh3_64()
        for address, nbytes in zip(
            pieces.addresses[row].tolist(), pieces.nbytes.tolist(), strict=True
        ):
            at = bisect.bisect(self._starts, address) - 1
            region, view = self._ranges[at] if at >= 0 else (None, None)
            if region is None or view is None or address + nbytes > region.address + region.nbytes:
                return None
            start = address - region.address
            digest.update(view[start : start + nbytes])
        return digest.intdigest()
