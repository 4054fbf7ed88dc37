# SPDX-License-Identifier: Apache-2.0
"""A tier in an object store: several objects in each of its objects, which are called bundles.

Nothing in the object store tells of all bundles: who takes them over lists them, and reads their
heads. A bundle is stored as a whole or not at all, so that a process that is killed leaves none
that is incomplete.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import xxhash

from kvstore.memory.policies import Policy
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.tiers.base import Found, Laid, Usage, Wanted, Written
from kvstore.tiers.bucket import Bucket, BucketError
from kvstore.tiers.bundleheads import (
    HEAD_BYTES_MAX,
    PAGES_MAX,
    bundle_head,
    pages_of,
    removed_head,
    removed_of,
)
from kvstore.tiers.bundles import Bundle, Bundles, Page, grouped
from kvstore.tiers.object_tombstones import KIND, ObjectTombstones

__all__ = ["BUNDLE_BYTES", "Objects"]

logger = logging.getLogger(__name__)

BUNDLE_BYTES: Final = 16 << 20
"""Of a bundle; one with a single object may be larger."""
BUNDLES_MIN: Final = 16
"""A small store has smaller bundles, so that it need not delete much at once."""
WRITES_AT_ONCE: Final = 4
READS_AT_ONCE: Final = 8
SMALL_AT_ONCE: Final = 32
"""Requests for heads, and deletions."""
TOLD_EVERY_S: Final = 60.0
"""A failure is logged so often at most."""
_NAME: Final = re.compile(rf"([0-9a-f]{{32}})\.(bundle|removed|{KIND})1")
"""Of an object in the object store. The number changes with the layout."""
_LAYOUT: Final = 1

Group = tuple[Bundle, list[tuple[Page, Wanted]]]


class Objects:
    """See ``Tier``."""

    batch_max: Final = PAGES_MAX

    def __init__(
        self,
        bucket: Bucket,
        label: str,
        nbytes: int,
        object_bytes_max: int,
        policy: Callable[[], Policy],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Lists what is there. What is not a bundle is left alone.

        Args:
            bucket: is this object's from now on, and closed by it. All bundles in it are.
            label: what the log calls it.
            nbytes: of all bundles.
            object_bytes_max: a bundle has room for such an object.
            policy: of bundles.
            clock: of the log, in seconds.

        Raises:
            ValueError: ``nbytes`` is too small.
            OSError: the object store does not answer, or refuses to list.
        """
        self._bucket = bucket
        self._label = label
        if nbytes < object_bytes_max + HEAD_BYTES_MAX:
            bucket.close()
            raise ValueError(
                f"objects_size={nbytes} is too small: an object of {object_bytes_max} bytes"
                f" (chunk_bytes) and its head take {object_bytes_max + HEAD_BYTES_MAX}"
            )
        self._bundle_bytes = min(BUNDLE_BYTES, nbytes // BUNDLES_MIN)
        self._bundles = Bundles(nbytes, policy())
        self._lock = threading.Lock()
        #: By name: size of what is there at the start, and when it was written.
        self._left: dict[str, tuple[int, float]] = {}
        #: Bundles whose removed objects are to be written down.
        self._untold: dict[bytes, Bundle] = {}
        #: Bundles of which something tells removed objects.
        self._with_removed: set[bytes] = set()
        #: There may be objects that this process does not know, and the next one does: what says
        #: that these were removed has to stay.
        self._is_blind = False
        self._failed = self._corrupted = 0
        self._failures = RateLimitedLog(logger, clock, TOLD_EVERY_S)
        self._losses = RateLimitedLog(logger, clock, TOLD_EVERY_S)
        try:
            self._left = bucket.sizes()
        except BucketError as exc:
            bucket.close()
            raise OSError(f"objects={label!r} cannot be listed: {exc}") from exc
        #: What was removed, and may be in a bundle still.
        self.tombstones: Final = ObjectTombstones(
            bucket, [(one, self._left[name][0]) for name, one in self._ids(KIND)]
        )

    def close(self) -> None:
        """See ``Tier``."""
        self.tombstones.close()
        self._bucket.close()

    def usage(self) -> Usage:
        """See ``Tier``."""
        with self._lock:
            return Usage(
                len(self._bundles),
                self._bundles.nbytes,
                self._bundles.capacity,
                self._failed,
                self._corrupted,
            )

    # -- what was left behind

    def _ids(self, kind: str) -> list[tuple[str, bytes]]:
        """Names and ids of what was left behind."""
        matches = [match for name in self._left if (match := _NAME.fullmatch(name))]
        return [(one[0], bytes.fromhex(one[1])) for one in matches if one[2] == kind]

    def found(self) -> Sequence[Found]:
        """See ``Tier``. Raises ``OSError`` if it cannot be read what was removed."""
        try:
            removed = self.tombstones.read()
        except BucketError as exc:
            raise OSError(f"objects={self._label!r} does not say what was removed: {exc}") from exc
        is_told_of = bool(self._ids(KIND))
        self._adopt()
        if is_told_of:
            with self._lock:
                dead = [page.name for page in self._bundles.pages() if page.name in removed]
            self.tombstones.reset_left()
            self.remove(dead)
        with self._lock:
            return [Found(page.name, page.nbytes) for page in self._bundles.pages()]

    def _adopt(self) -> None:
        """Takes over the bundles."""
        self._with_removed = {one for _, one in self._ids("removed")}
        ids = [one for _, one in self._ids("bundle")]
        ids.sort(key=lambda one: (self._left[_bundle_name(one)][1], one))
        heads = self._bucket.each(self._head, ids, SMALL_AT_ONCE)
        unread = 0
        with self._lock:
            for bundle_id, head in zip(ids, heads, strict=True):
                nbytes = self._left[_bundle_name(bundle_id)][0]
                if isinstance(head, BucketError):
                    unread += 1
                    self._note(head)
                elif head is None:
                    self._bundles.delete(bundle_id, nbytes)
                    self._corrupted += 1
                    logger.warning("a bundle in %s is not whole, and is deleted", self._label)
                else:
                    self._bundles.adopt(head)
            for orphan in self._with_removed.difference(ids):
                self._bundles.delete(orphan, 0)
            self._left.clear()
            if unread:
                self._is_blind = True
                logger.warning(
                    "%d bundles in %s cannot be read, and stay there without use until a restart",
                    unread,
                    self._label,
                )

    async def _head(self, bundle_id: bytes) -> Bundle | None:
        """A bundle, by its head and what was removed from it; None if these cannot be right."""
        name = _bundle_name(bundle_id)
        nbytes = self._left[name][0]
        if not nbytes:
            return None
        pages = pages_of(await self._bucket.begin(name, min(HEAD_BYTES_MAX, nbytes)), nbytes)
        removed: set[bytes] | None = set()
        if bundle_id in self._with_removed:
            name = _removed_name(bundle_id)
            raw = await self._bucket.begin(name, self._left[name][0])
            removed = removed_of(raw, bundle_id)
        if pages is None or removed is None:
            return None
        return Bundle(bundle_id, nbytes, pages, removed=removed & pages.keys())

    # -- objects

    def write(self, objects: Sequence[Laid]) -> Written:
        """See ``Tier``."""
        gone: list[bytes] = []
        runs = grouped(objects, self._bundle_bytes)
        for first in range(0, len(runs), WRITES_AT_ONCE):
            wave = [objects[run] for run in runs[first : first + WRITES_AT_ONCE]]
            if not self._write(wave, gone):
                break
        with self._lock:  # What went for others of this write, too, is not there.
            return Written([self._bundles.find(one.name) is not None for one in objects], gone)

    def _write(self, wave: Sequence[Sequence[Laid]], gone: list[bytes]) -> bool:
        """Writes a bundle for each run. Whether it is worth to try more."""
        jobs = []
        for run in wave:
            head, pages = bundle_head(run)
            nbytes = len(head) + sum(one.nbytes for one in run)
            jobs.append((Bundle(os.urandom(16), nbytes, pages), head, run))
        total = sum(bundle.nbytes for bundle, _, _ in jobs)
        with self._lock:
            gone += self._bundles.make_room(min(total, self._bundles.capacity))
        if not self._settle():
            return False
        with self._lock:
            fitting = [job for job in jobs if self._bundles.reserve(job[0].nbytes)]
        outcomes = self._bucket.each(self._put, fitting, WRITES_AT_ONCE)
        with self._lock:
            for (bundle, _, _), outcome in zip(fitting, outcomes, strict=True):
                if isinstance(outcome, BucketError):
                    self._note(outcome)
                    self._bundles.fail(bundle)
                else:
                    self._bundles.store(bundle)
        return not any(isinstance(one, BucketError) for one in outcomes)

    async def _put(self, job: tuple[Bundle, bytes, Sequence[Laid]]) -> None:
        bundle, head, run = job
        data = b"".join([head, *(one.memory[: one.nbytes] for one in run)])
        await self._bucket.put(_bundle_name(bundle.id), data)

    def read(self, objects: Sequence[Wanted], *, is_use: bool = True) -> Sequence[int | None]:
        """See ``Tier``."""
        groups: dict[bytes, Group] = {}
        with self._lock:
            for one in objects:
                found = self._bundles.find(one.name)
                if found is not None and found[1].nbytes == one.nbytes:
                    if is_use:
                        self._bundles.touch(one.name)
                    bundle, page = found
                    groups.setdefault(bundle.id, (bundle, []))[1].append((page, one))
        outcomes = self._bucket.each(self._read, list(groups.values()), READS_AT_ONCE)
        right: dict[bytes, int] = {}
        with self._lock:
            for (bundle, pairs), outcome in zip(groups.values(), outcomes, strict=True):
                for page, _ in pairs:
                    if not isinstance(outcome, BucketError) and page.name in outcome:
                        right[page.name] = page.checksum
                    elif self._bundles.forget(page.name, bundle):  # Else it went meanwhile.
                        self._note_lost(outcome)
        return [right.get(one.name) for one in objects]

    async def _read(self, group: Group) -> set[bytes]:
        """Reads objects of one bundle into their memory; the names of those that are right."""
        bundle, pairs = group
        pairs = sorted(pairs, key=lambda pair: pair[0].offset)
        parts = await self._bucket.ranges(
            _bundle_name(bundle.id),
            [page.offset for page, _ in pairs],
            [page.nbytes for page, _ in pairs],
        )
        right = set()
        for (page, wanted), part in zip(pairs, parts, strict=True):
            if xxhash.xxh3_64_intdigest(part) == page.checksum:
                wanted.memory[: page.nbytes] = part
                right.add(page.name)
        return right

    def remove(self, names: Sequence[bytes]) -> None:
        """See ``Tier``. If the object store refuses it now, it is tried again with each write: a
        restart before that finds the objects again, unless ``tombstones`` tell of them."""
        with self._lock:
            self._untold |= {one.id: one for one in self._bundles.remove(names)}
        self._settle()

    def _settle(self) -> bool:
        """Deletes bundles that have to go, and writes down what was removed from others. Whether no
        bundle is left that has to go."""
        with self._lock:
            to_delete = self._bundles.to_delete
            for one in to_delete:
                self._untold.pop(one, None)
            untold = [(one.id, removed_head(one.id, one.removed)) for one in self._untold.values()]
        deleted = self._bucket.each(self._delete, to_delete, SMALL_AT_ONCE)
        told = self._bucket.each(self._tell_removed, untold, SMALL_AT_ONCE)
        with self._lock:
            for bundle_id, outcome in zip(to_delete, deleted, strict=True):
                if isinstance(outcome, BucketError):
                    self._note(outcome)
                else:
                    self._bundles.deleted(bundle_id)
            for (bundle_id, _), outcome in zip(untold, told, strict=True):
                if isinstance(outcome, BucketError):
                    self._note(outcome)
                else:
                    del self._untold[bundle_id]
            is_told = not (self._untold or self._bundles.to_delete or self._is_blind)
        if is_told:
            failed = self.tombstones.delete()
            with self._lock:
                for exc in failed:
                    self._note(exc)
        return not any(isinstance(one, BucketError) for one in deleted)

    async def _delete(self, bundle_id: bytes) -> None:
        await self._bucket.delete(_bundle_name(bundle_id))
        if bundle_id in self._with_removed:
            await self._bucket.delete(_removed_name(bundle_id))
            self._with_removed.discard(bundle_id)

    async def _tell_removed(self, job: tuple[bytes, bytes]) -> None:
        bundle_id, head = job
        self._with_removed.add(bundle_id)  # Before: it may be written though nobody answers.
        await self._bucket.put(_removed_name(bundle_id), head)

    # -- failures

    def _note_lost(self, outcome: set[bytes] | BucketError) -> None:
        """An object could not be read. The lock is held."""
        if isinstance(outcome, BucketError):
            self._is_blind = True
            self._note(outcome)
        else:
            self._corrupted += 1
            self._losses.warn(
                "an object in %s cannot be read as it was written; it is dropped", self._label
            )

    def _note(self, exc: BucketError) -> None:
        """A request has failed. The lock is held."""
        self._failed += 1
        self._failures.warn(
            "%s cannot be used (%s): its pages are computed again until it works",
            self._label,
            exc,
        )


def _bundle_name(bundle_id: bytes) -> str:
    return f"{bundle_id.hex()}.bundle{_LAYOUT}"


def _removed_name(bundle_id: bytes) -> str:
    return f"{bundle_id.hex()}.removed{_LAYOUT}"
