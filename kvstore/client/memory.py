# SPDX-License-Identifier: Apache-2.0
"""The memory that a client reads into and stores from, as the processor sees it."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

import te
from kvstore import _bytes
from kvstore.objects.pieces import U64, Pieces
from te.memory import described

__all__ = ["Memory"]

Spans: TypeAlias = tuple[U64, U64]
"""Where ranges begin and where they end, in order."""


class Memory:
    """Registered ranges and, where the processor can read them, their bytes. All methods are
    thread-safe."""

    def __init__(self, make_engine: Callable[[], te.Engine]) -> None:
        """``make_engine`` is called when an engine is needed: for memory that the processor cannot
        read, or by who reads by te. Once, if that engine takes all memory."""
        self._make_engine = make_engine
        self._engine: te.Engine | None = None
        self._is_closed = False
        self._lock = threading.RLock()
        self._serials = itertools.count(1)
        self._starts: list[int] = []
        self._ranges: list[tuple[te.Region, memoryview | None]] = []
        #: What the engine knows them as that were registered before it.
        self._known: dict[te.Region, te.Region] = {}
        self._note()

    @property
    def engine(self) -> te.Engine:
        """With all ranges. If it is made now, it raises what ``te.Engine`` and its ``register``
        raise; ``te.ClosedError`` behind ``close``."""
        with self._lock:
            if self._engine is None:
                if self._is_closed:
                    raise te.ClosedError("the store was closed")
                self._engine = self._made()
            return self._engine

    def _made(self) -> te.Engine:
        engine = self._make_engine()
        try:
            self._known = {
                one: engine.register(view, one.nbytes, remote="none") for one, view in self._ranges
            }
        except BaseException:
            engine.close()  # The next attempt makes another one.
            raise
        return engine

    def close(self) -> None:
        """For who has no other way to close the engine: closes it, and waits for one that is being
        made. Raises what ``te.Engine.close`` raises."""
        with self._lock:
            self._is_closed = True
            engine = self._engine
        if engine is not None:
            engine.close()

    @property
    def has_engine(self) -> bool:
        """Whether one was needed so far."""
        return self._engine is not None

    @property
    def is_used(self) -> bool:
        """Whether there is any memory to read into."""
        return bool(self._starts)

    @property
    def has_unreadable(self) -> bool:
        """Whether there is memory that the processor cannot read. Each get asks, and waits for
        nobody who registers memory."""
        return self._has_unreadable

    def register(self, memory: Any, nbytes: int | None = None) -> te.Region:
        """See ``te.Engine.register``; peers get no rights. Memory behind a bare address is not
        compared with checksums: give a buffer instead where there is one."""
        with self._lock:
            if self._engine is None and not isinstance(memory, int):
                region = self._registered(memory, nbytes)
            else:
                region = self.engine.register(memory, nbytes, remote="none")
            self._insert(region, None if isinstance(memory, int) else memory)
            return region

    def _registered(self, memory: Any, nbytes: int | None) -> te.Region:
        """Without an engine."""
        address, nbytes, owner = described(memory, nbytes)
        for one, _ in self._ranges:
            if one.address < address + nbytes and address < one.end:
                raise te.RegistrationError(
                    f"[{address:#x}, {address + nbytes:#x}) of {nbytes} bytes overlaps the"
                    f" registered region {one}"
                )
        return te.Region(address, nbytes, "host", next(self._serials), owner, remote="none")

    def know(self, region: te.Region, buffer: Any) -> None:
        """A range that somebody else has registered with the engine, and keeps."""
        with self._lock:
            self._insert(region, buffer)

    def _insert(self, region: te.Region, buffer: Any) -> None:
        view = None if buffer is None else memoryview(buffer).cast("B")[: region.nbytes]
        at = bisect.bisect(self._starts, region.address)
        self._starts.insert(at, region.address)
        self._ranges.insert(at, (region, view))
        self._note()

    def deregister(self, region: te.Region) -> None:
        """See ``te.Engine.deregister``."""
        with self._lock:
            at = bisect.bisect(self._starts, region.address) - 1
            if at < 0 or self._ranges[at][0] is not region:
                raise te.RegistrationError(f"{region!r} was not registered with the store")
            if self._engine is not None:
                self._engine.deregister(self._known.get(region, region))
                self._known.pop(region, None)
            del self._starts[at], self._ranges[at]
            self._note()

    def is_readable(self, pieces: Pieces) -> bool:
        """Whether the processor can read all of these, and write them. ``te.BoundsError`` if they
        are not registered, where no engine says so."""
        starts, ends = self._readable
        is_readable = _bytes.covers(starts, ends, pieces.addresses, pieces.nbytes)
        if not is_readable and self._engine is None:
            first = int(pieces.addresses.flat[0]) if len(pieces) else 0
            raise te.BoundsError(
                f"not all of {len(pieces)} objects of {pieces.object_bytes} bytes, the first one at"
                f" {first:#x}, lie in registered memory"
            )
        return is_readable

    def _note(self) -> None:
        """Behind a change."""
        self._has_unreadable = any(view is None for _, view in self._ranges)
        self._readable = _spans([one for one, view in self._ranges if view is not None])


def _spans(regions: Sequence[te.Region]) -> Spans:
    starts = np.array([one.address for one in regions], np.uint64)
    return starts, starts + np.array([one.nbytes for one in regions], np.uint64)
