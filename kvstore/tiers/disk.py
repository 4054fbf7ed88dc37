# SPDX-License-Identifier: Apache-2.0
"""A tier of segment files.

A place's head is written before its object, in one call: a process that is killed in between leaves
a head with a checksum that its object has not. The last writes of a former process are read and
compared when its files are taken over, all others when they are wanted. The disk is never told to
flush: after a crash of the machine more objects may be dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvstore.memory.policies import Policy
from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.changes import Records
from kvstore.threads import Threads
from kvstore.tiers.base import Found, Laid, Usage, Wanted, Written
from kvstore.tiers.heads import (
    PLACE_HEAD,
    place_head,
    places_of,
    segment_head,
    segment_of_head,
    told,
)
from kvstore.tiers.segmentfiles import SegmentFiles, aligned
from kvstore.tiers.segments import Place, Segments

__all__ = ["BATCH_MAX", "Disk"]

logger = logging.getLogger(__name__)

THREADS: Final = 4
BATCH_MAX: Final = 64
"""Objects of one write. So many of the last ones may be incomplete when a process is killed."""
RUN_BYTES: Final = 1 << 20
"""Heads of small places are read together with what lies between them, so much at once."""


class Disk:
    """See ``Tier``."""

    batch_max: Final = BATCH_MAX

    def __init__(
        self, directory: Path, nbytes: int, object_bytes_max: int, policy: Callable[[], Policy]
    ) -> None:
        """See ``SegmentFiles``."""
        self._files = SegmentFiles(directory, nbytes, object_bytes_max)
        units = self._files.segment_bytes // UNIT_BYTES - 1
        self._segments = Segments(self._files.count, units, policy)
        self._directory = directory
        self._lock = threading.Lock()
        self._pool = Threads(THREADS, "kvstore-disk")
        self._pages = threading.local()
        self._failed = self._corrupted = 0
        self._is_failing = False

    def close(self) -> None:
        """See ``Tier``."""
        self._pool.shutdown()
        self._files.close()

    def usage(self) -> Usage:
        """See ``Tier``."""
        with self._lock:
            return Usage(
                len(self._segments),
                self._segments.nbytes,
                self._files.count * self._files.segment_bytes,
                self._failed,
                self._corrupted,
            )

    # -- what was left behind

    def found(self) -> Sequence[Found]:
        """See ``Tier``."""
        heads: dict[int, tuple[int, int]] = {}
        newest: dict[bytes, Place] = {}
        for segment, (head, places) in enumerate(
            self._pool.map(self._scan, range(self._files.count))
        ):
            if head is None:
                continue
            heads[segment] = head
            for name, place in places:
                if name not in newest or newest[name].sequence < place.sequence:
                    newest[name] = place
        last = sorted(newest, key=lambda one: newest[one].sequence)[-BATCH_MAX:]
        checked = self._pool.map(lambda one: self._is_whole(one, newest[one]), last)
        for name, is_whole in zip(last, checked, strict=True):
            if not is_whole:
                self._wipe(newest.pop(name))
                logger.warning("an object in %s is incomplete, and dropped", self._directory)
        with self._lock:
            self._segments.adopt(heads, newest)
        return [Found(name, place.nbytes) for name, place in newest.items()]

    def _scan(self, segment: int) -> tuple[tuple[int, int] | None, list[tuple[bytes, Place]]]:
        page = self._page()
        try:
            self._files.read(segment, 0, [page])
            head = segment_of_head(bytes(page), self._files.segment_bytes)
            if head is None:
                return None, []
            heads = self._heads(segment, head[0])
        except OSError as exc:
            self._note_failure(exc)
            return None, []
        first = segment * self._segments.segment_units
        return head, [
            (name, Place(first + place.slot, place.nbytes, place.serial, place.sequence))
            for _, name, place in places_of(heads, *head)
        ]

    def _heads(self, segment: int, units: int) -> Records:
        """Of all places of a segment."""
        count = self._segments.segment_units // units
        heads = np.zeros(count, PLACE_HEAD)
        nbytes = units * UNIT_BYTES
        run = max(RUN_BYTES // nbytes, 1) if nbytes <= RUN_BYTES // 16 else 1
        buffer = aligned(run * nbytes if run > 1 else UNIT_BYTES)
        for first in range(0, count, run):
            some = min(run, count - first)
            part = buffer[: some * nbytes] if run > 1 else buffer
            self._files.read(segment, 1 + first * units, [part])
            for i in range(some):
                heads[first + i] = np.frombuffer(part, PLACE_HEAD, 1, i * nbytes)[0]
        return heads

    def _is_whole(self, name: bytes, place: Place) -> bool:
        memory = aligned(-(-place.nbytes // UNIT_BYTES) * UNIT_BYTES)
        return self._read_at(Wanted(name, place.nbytes, memory), place) is not None

    # -- objects

    def write(self, objects: Sequence[Laid]) -> Written:
        """See ``Tier``."""
        places: list[Place | None] = []
        gone: list[bytes] = []
        fresh: dict[int, tuple[int, int]] = {}
        with self._lock:
            for one in objects:
                taken = self._segments.take(one.nbytes)
                places.append(taken.place)
                gone += taken.gone
                if taken.fresh is not None:
                    fresh[taken.fresh] = self._segments.head(taken.fresh)
        without = {one for one, head in fresh.items() if not self._write_head(one, *head)}
        stored = list(
            self._pool.map(lambda one, place: self._write(one, place, without), objects, places)
        )
        with self._lock:
            for segment in without:
                self._segments.head_failed(segment)
            for one, place, is_stored in zip(objects, places, stored, strict=True):
                if place is not None and is_stored:
                    self._segments.store(one.name, place)
                else:
                    self._segments.release(place)
        return Written(stored, gone)

    def _write_head(self, segment: int, units: int, serial: int) -> bool:
        page = self._page()
        page[:] = segment_head(self._files.segment_bytes, units, serial).ljust(UNIT_BYTES, b"\0")
        return self._try_write(segment, 0, [page])

    def _write(self, one: Laid, place: Place | None, without: set[int]) -> bool:
        if place is None:
            return False
        segment, unit = self._segments.segment_of(place)
        if segment in without:
            return False
        page = self._page()
        page[:] = place_head(one.name, place, one.checksum).ljust(UNIT_BYTES, b"\0")
        return self._try_write(segment, 1 + unit, [page, one.memory])

    def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
        """See ``Tier``."""
        with self._lock:
            places = [self._segments.place(one.name) for one in objects]
            for one, place in zip(objects, places, strict=True):
                if place is not None and is_use:
                    self._segments.touch(one.name)
        return list(self._pool.map(self._read, objects, places))

    def _read(self, one: Wanted, place: Place | None) -> int | None:
        if place is None or place.nbytes != one.nbytes:
            return None
        checksum = self._read_at(one, place)
        if checksum is None:
            with self._lock:
                if self._segments.place(one.name) is place:  # Else it went while it was read.
                    self._corrupted += 1
                    self._segments.release(self._segments.remove(one.name))
                    logger.warning(
                        "an object in %s cannot be read as it was written; it is dropped",
                        self._directory,
                    )
        return checksum

    def _read_at(self, one: Wanted, place: Place) -> int | None:
        segment, unit = self._segments.segment_of(place)
        page = self._page()
        try:
            self._files.read(segment, 1 + unit, [page, one.memory])
        except OSError as exc:
            self._note_failure(exc)
            return None
        checksum = told(bytes(page), one.name, place)
        is_right = checksum == xxhash.xxh3_64_intdigest(one.memory[: one.nbytes])
        return checksum if is_right else None

    def remove(self, names: Sequence[bytes]) -> None:
        """See ``Tier``."""
        with self._lock:
            removed = [self._segments.remove(name) for name in names]
        places = [one for one in removed if one is not None]
        list(self._pool.map(self._wipe, places))
        with self._lock:
            for place in places:
                self._segments.release(place)

    def _wipe(self, place: Place) -> None:
        segment, unit = self._segments.segment_of(place)
        page = self._page()
        page[:] = bytes(UNIT_BYTES)
        self._try_write(segment, 1 + unit, [page])

    # -- the device

    def _page(self) -> memoryview:
        """Of the calling thread."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = aligned(UNIT_BYTES)
        return page

    def _try_write(self, segment: int, unit: int, buffers: Sequence[memoryview]) -> bool:
        try:
            self._files.write(segment, unit, buffers)
        except OSError as exc:
            self._note_failure(exc)
            return False
        if self._is_failing:
            self._is_failing = False
            logger.info("%s can be written again", self._directory)
        return True

    def _note_failure(self, exc: OSError) -> None:
        with self._lock:
            self._failed += 1
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            logger.warning(
                "%s cannot be read or written (%s): its pages are computed again until it works",
                self._directory,
                exc,
            )
