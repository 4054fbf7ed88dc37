# SPDX-License-Identifier: Apache-2.0
"""The memory that a client reads into and stores from, as the processor sees it."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np

import te
from kvstore import _bytes
from kvstore.objects.pieces import U64, Pieces

__all__ = ["Memory"]

Spans: TypeAlias = tuple[U64, U64]
"""Where ranges begin and where they end, in order."""


class Memory:
    """Registered ranges and, where the processor can read them, their bytes."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine: Final = engine
        self._starts: list[int] = []
        self._ranges: list[tuple[te.Region, memoryview | None]] = []
        self._note()

    def register(self, memory: Any, nbytes: int | None = None) -> te.Region:
        """See ``te.Engine.register``; peers get no rights. Memory behind a bare address is not
        compared with checksums: give a buffer instead where there is one."""
        region = self._engine.register(memory, nbytes, remote="none")
        view = None if isinstance(memory, int) else memoryview(memory).cast("B")[: region.nbytes]
        at = bisect.bisect(self._starts, region.address)
        self._starts.insert(at, region.address)
        self._ranges.insert(at, (region, view))
        self._note()
        return region

    def deregister(self, region: te.Region) -> None:
        """See ``te.Engine.deregister``."""
        at = bisect.bisect(self._starts, region.address) - 1
        if at < 0 or self._ranges[at][0] is not region:
            raise te.RegistrationError(f"{region!r} was not registered with the store")
        self._engine.deregister(region)
        del self._starts[at], self._ranges[at]
        self._note()

    def is_readable(self, pieces: Pieces) -> bool:
        """Whether the processor can read all of these, and write them."""
        starts, ends = self._readable
        return _bytes.covers(starts, ends, pieces.addresses, pieces.nbytes)

    def _note(self) -> None:
        """Behind a change."""
        self._readable = _spans([one for one, view in self._ranges if view is not None])


def _spans(regions: Sequence[te.Region]) -> Spans:
    starts = np.array([one.address for one in regions], np.uint64)
    return starts, starts + np.array([one.nbytes for one in regions], np.uint64)
