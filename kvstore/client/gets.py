# SPDX-License-Identifier: Apache-2.0
"""How objects are got: by owner, out of memory of this host or by te, and from lower tiers at
last."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.client.load_times import LoadTimes, source_of
from kvstore.client.mapped_reads import MappedGroup
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool
from kvstore.client.promoting import promoted_parts
from kvstore.client.reading import HEADERS_MAX, Group, HeaderRooms, cancel
from kvstore.objects.changes import LOWER_TIER, PLACE, Found, Keys, Records, fingerprint_of
from kvstore.objects.copying import Copier
from kvstore.objects.headers import tell_apart
from kvstore.objects.outcomes import Got
from kvstore.objects.pieces import U64, Pieces

__all__ = ["Gets", "Span"]

ATTEMPTS: Final = 2
"""A get looks again for what an owner has not given."""
BARREN_MAX: Final = 8
"""So often an object may be pushed out again between its promotion and its read."""
SETTLED: Final = {Got.RIGHT, Got.MISSING, Got.REJECTED, Got.NOT_PROMOTED}
"""Outcomes that a second look would not change."""
TO_ASK: Final = {Got.NOT_PROMOTED, Got.MOVED}
"""Outcomes of which the owner knows more: it is asked where the object is."""
TO_PROMOTE: Final = TO_ASK | {Got.UNREACHABLE}
"""Outcomes of a promotion after which another owner may have a copy."""


class Span(NamedTuple):
    """Which bytes of objects are read: from an offset on as many as the destination has."""

    #: Of each object.
    nbytes: int
    offset: int = 0


class Gets:
    """The gets of one process. All methods are thread-safe; all deadlines are of the monotonic
    clock."""

    def __init__(
        self,
        owners: Pool,
        memory: Memory,
        rooms: HeaderRooms,
        copier: Copier,
        load_times: LoadTimes,
        verify: bool,
    ) -> None:
        """``verify``: ``Config.verify``."""
        self._owners = owners
        self._memory = memory
        self._rooms = rooms
        self._copier = copier
        self._load_times = load_times
        self._verify = verify

    def get(
        self,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        deadline_s: float,
        span: Span | None = None,
        checksums: U64 | None = None,
    ) -> list[Got]:
        """See ``Store.get``, and ``Store.get_range``. ``checksums``: shape (n,), gets those of
        objects that te has brought and whose bytes were compared with them."""
        span = Span(destination.object_bytes) if span is None else span
        self._owners.touch_soon(keys, signature, span.nbytes)
        outcomes = [Got.MISSING] * len(keys)
        open_rows: Sequence[int] = range(len(keys))
        open_keys = keys
        fingerprint = fingerprint_of(signature, span.nbytes)
        failed: set[int] = set()
        is_readable = self._memory.is_readable(destination)
        at_once = self._verify and is_readable and span.nbytes == destination.object_bytes
        for _ in range(ATTEMPTS):
            places = self._owners.look_up(
                open_keys, fingerprint, self._owners.ranks_without(failed)
            )
            found = self._groups(keys, signature, span.nbytes, open_rows, places, outcomes)
            near, groups = _by_way(found, is_readable)
            self._read(groups, destination, span, outcomes, deadline_s, near=near, at_once=at_once)
            if checksums is not None and self._verify and is_readable:
                for group in groups:
                    if group.found is not None:
                        checksums[list(group.rows)] = group.found["checksum"]
            if outcomes.count(Got.RIGHT) == len(keys):
                return outcomes
            open_rows = [row for row in open_rows if outcomes[row] not in SETTLED]
            if not open_rows or time.monotonic() > deadline_s:
                break
            open_keys = keys[np.asarray(open_rows, np.intp)]
            # Now it is told which bytes are wrong, and which were another object's.
            at_once = False
            failed.update(
                group.source.number
                for group in groups
                if group.failed is not None and not group.source.is_far
            )
        lower = [row for row, one in enumerate(outcomes) if one in TO_ASK]
        if lower:
            self._get_from_lower_tier(
                keys, signature, destination, span, lower, outcomes, deadline_s, is_readable
            )
        return outcomes

    def bytes_per_s(self, owner: int) -> float:
        """Of reads from an owner's memory; 0.0 while that is not known."""
        return self._load_times.bytes_per_s(owner)

    # -- part by part (``kvstore.loading``)

    def locate(
        self, keys: Keys, signature: bytes, destination: Pieces
    ) -> tuple[list[Got], list[Group]]:
        """For ``Load``: outcomes of objects that are not found, and those that are, by owner."""
        self._owners.touch_soon(keys, signature, destination.object_bytes)
        outcomes = [Got.MISSING] * len(keys)
        fingerprint = fingerprint_of(signature, destination.object_bytes)
        is_readable = self._memory.is_readable(destination)
        places = self._owners.look_up(keys, fingerprint)
        rows = range(len(keys))
        nbytes = destination.object_bytes
        groups = self._groups(keys, signature, nbytes, rows, places, outcomes)
        if is_readable:
            groups = [self._mapped(one) for one in groups]
        return outcomes, groups

    def _mapped(self, group: Group) -> Group:
        """The group, or one that asks its owner nothing, if the owner's memory is mapped here."""
        window = group.source.window
        return group if window is None else MappedGroup(group, window, self._copier)

    def check(self, group: Group, deadline_s: float) -> None:
        """For ``Load``: whether the objects of a group still lie where they were looked up; if one
        does not, or that cannot be told, the group has failed. What was read before is of them."""
        group.found = group.check(self._rooms, deadline_s)
        if group.found is not None and not tell_apart(group.found, group.wanted).all():
            group.fail(Got.MOVED, "an object has moved")

    def finish(
        self,
        group: Group,
        destination: Pieces,
        outcomes: list[Got],
        deadline_s: float,
        *,
        is_whole: bool = True,
    ) -> None:
        """Waits for a group's reads and checks it; its rows get their outcome. ``is_whole``: whole
        objects were read, so that checksums tell whether they are right."""
        group.wait(deadline_s)
        at_once = group.room is not None  # Their checksums were known to be compared.
        wrong = Got.MOVED if at_once else Got.CORRUPTED
        if group.failed is None:
            group.found = group.check(self._rooms, deadline_s)
        if group.failed is None:
            self.accept(group, destination, outcomes, wrong, is_whole=is_whole, is_readable=at_once)
            return
        link = group.source.link
        is_dead = group.failed is Got.UNREACHABLE and (link is None or not link.alive)
        if is_dead or (group.source.is_far and group.failed is not Got.MOVED):
            self._owners.pause(group.source.number, group.reason)
        if group.failed is Got.TIMED_OUT:  # It takes that long, and more.
            self._measure(group, destination)
        for row in group.rows:
            outcomes[row] = group.failed

    def accept(
        self,
        group: Group,
        destination: Pieces,
        outcomes: list[Got],
        wrong: Got = Got.CORRUPTED,
        *,
        is_whole: bool = True,
        is_readable: bool = False,
    ) -> None:
        """For ``Load``: all bytes are there, and their headers were read behind them
        (``Group.found``). Compares checksums; the rows get their outcome. ``wrong``: that of bytes
        with another checksum. ``is_readable``: the processor is known to read the destination."""
        assert group.found is not None
        self._measure(group, destination)
        pieces = group.of_all(destination)
        verify = self._verify and is_whole and (is_readable or self._memory.is_readable(pieces))
        codes = self._copier.judge(group.found, group.wanted, pieces, verify)
        group.tell(codes, outcomes, wrong)

    # -- by owner

    def _groups(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        rows: Sequence[int],
        places: Records,
        outcomes: list[Got],
        *,
        brought: bool = False,
    ) -> list[Group]:
        """The rows that were found, by owner; the others get their outcome. ``brought``: see
        ``Pool.source``."""
        if len(places) == len(keys) <= HEADERS_MAX:
            sole = self._owners.source_of_all(places, brought=brought)
            if sole is not None:
                return [Group.of(sole, rows, keys, signature, nbytes, places)]
        wanted = np.asarray(rows, np.intp)
        whole = places
        if len(places) < len(keys):
            whole = np.zeros(len(keys), PLACE)
            whole[wanted] = places
        for row in wanted[places["found"] == Found.OTHER].tolist():
            outcomes[row] = Got.REJECTED
        for row in wanted[places["found"] == Found.SILENT].tolist():
            outcomes[row] = Got.UNREACHABLE
        is_in_lower_tier = (places["found"] == Found.HERE) & (places["slot"] == LOWER_TIER)
        for row in wanted[is_in_lower_tier].tolist():
            outcomes[row] = Got.NOT_PROMOTED
        found = wanted[(places["found"] == Found.HERE) & ~is_in_lower_tier]
        groups: list[Group] = []
        owners = whole["owner"][found]
        for number in sorted(set(owners.tolist())):
            of_owner = found[owners == number]
            source = self._owners.source(number, brought=brought)
            if source is None:
                for row in of_owner.tolist():
                    outcomes[row] = Got.UNREACHABLE
                continue
            for first in range(0, len(of_owner), HEADERS_MAX):
                some = of_owner[first : first + HEADERS_MAX].tolist()
                groups.append(Group.of(source, some, keys, signature, nbytes, whole))
        return groups

    def _bring(self, group: Group, destination: Pieces, span: Span, outcomes: list[Got]) -> None:
        """Copies a group out of memory of this host; its rows get their outcome."""
        window = group.source.window
        assert window is not None
        pieces = group.of_all(destination)
        begun_s = time.monotonic()
        verify = self._verify and span.nbytes == destination.object_bytes
        codes = group.bring(pieces, window, self._copier, verify, span.offset)
        took_s = time.monotonic() - begun_s
        nbytes = len(codes) * destination.object_bytes
        self._load_times.measured(group.source.number, took_s, nbytes)
        group.tell(codes, outcomes)

    def _read(
        self,
        groups: Sequence[Group],
        destination: Pieces,
        span: Span,
        outcomes: list[Got],
        deadline_s: float,
        *,
        near: Sequence[Group] = (),
        at_once: bool = False,
    ) -> None:
        """Reads objects. ``near``: further ones, which are copied meanwhile. ``at_once``: headers
        come with the objects, and not behind them."""
        is_whole = span.nbytes == destination.object_bytes
        try:
            for group in groups:
                if at_once:
                    group.begin_with_headers(group.of_all(destination), self._rooms)
                else:
                    group.begin(group.of_all(destination), span.offset)
            for group in near:
                self._bring(group, destination, span, outcomes)
            for group in groups:
                self.finish(group, destination, outcomes, deadline_s, is_whole=is_whole)
        except BaseException:
            cancel(groups)
            raise

    # -- from lower tiers

    def _get_from_lower_tier(
        self,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        span: Span,
        rows: Sequence[int],
        outcomes: list[Got],
        deadline_s: float,
        is_readable: bool,
    ) -> None:
        """Reads objects that lie in the lower tier, as far as their owners promote them: some at a
        time, as they push out each other. Ends after a few rounds that have brought nothing."""
        nbytes, barren = span.nbytes, 0
        while rows and barren < BARREN_MAX and time.monotonic() < deadline_s:
            begun_s, read = time.monotonic(), list[Group]()
            before = [outcomes[row] for row in rows]
            moved = [one is Got.MOVED for one in before]
            for row in rows:
                outcomes[row] = Got.MISSING
            parts = promoted_parts(
                self._owners, keys[list(rows)], signature, nbytes, moved, deadline_s
            )
            with contextlib.closing(parts):
                for part, places in parts:
                    some = rows[part]
                    groups = self._groups(
                        keys, signature, nbytes, some, places, outcomes, brought=True
                    )
                    read += groups
                    near, far = _by_way(groups, is_readable)
                    self._read(far, destination, span, outcomes, deadline_s, near=near)
            self._measure_lower_tier(read, outcomes, nbytes, time.monotonic() - begun_s)
            left = [row for row in rows if outcomes[row] in TO_PROMOTE]
            for row, one in zip(rows, before, strict=True):
                # Its owner has said so, or is not looked up any more: it is not asked again.
                if outcomes[row] is Got.MISSING and one in (Got.MOVED, Got.UNREACHABLE):
                    outcomes[row] = one
            barren = barren + 1 if len(left) == len(rows) else 0
            rows = left

    # -- measurements

    def _measure(self, group: Group, destination: Pieces) -> None:
        nbytes = len(group.rows) * destination.object_bytes
        self._load_times.measured(group.source.number, group.took_s, nbytes)

    def _measure_lower_tier(
        self, groups: Sequence[Group], outcomes: Sequence[Got], nbytes: int, took_s: float
    ) -> None:
        """What lay in the lower tier took the time of its promotion, too. Owners promote one after
        the other."""
        right: Counter[int] = Counter()
        for group in groups:
            right[group.source.number] += sum(outcomes[row] is Got.RIGHT for row in group.rows)
        for number, count in right.items():
            if count:
                lower = int(source_of(np.uint16(number), np.True_))
                self._load_times.measured(lower, took_s, count * nbytes)


def _by_way(groups: list[Group], is_readable: bool) -> tuple[list[Group], list[Group]]:
    """Those that are copied out of memory of this host, and those that te reads. ``is_readable``:
    the processor can write the destination."""
    near = [one for one in groups if is_readable and one.source.window is not None]
    return near, [one for one in groups if one.source.window is None] if near else groups
