# SPDX-License-Identifier: Apache-2.0
"""The store, as one process uses it: puts, gets and look-ups."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

import te
from kvstore.admission import Judged, Numbers
from kvstore.asking import NoAnswer
from kvstore.changes import BELOW, PLACE, Found, Keys, Records, form_of
from kvstore.config import Config
from kvstore.copying import Copier
from kvstore.handles import Handle
from kvstore.judging import Judging, source_of
from kvstore.lifting import lifted_parts
from kvstore.meeting import meet
from kvstore.memory import Memory
from kvstore.outcomes import Got, Pinned, Put
from kvstore.owner import CLAIM_OBJECTS_MAX
from kvstore.owners import OWN, Owners
from kvstore.pieces import Pieces
from kvstore.pins import PIN_S_MAX
from kvstore.placement import choose
from kvstore.reading import HEADERS_MAX, Group, HeaderRooms
from kvstore.status import QUESTION, StoreStatus
from kvstore.writing import put_at_once, put_group
from te.status import process_name

__all__ = ["Store"]

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 2
"""A get looks again for what an owner has not given."""
BARREN_MAX: Final = 8
"""So often an object may be pushed out again between its lift and its read."""
MIN_PIN_S: Final = 0.001
ANY_FORM: Final = 0
"""With it a look-up finds a key as ``HERE`` or as ``OTHER``."""
SETTLED: Final = {Got.RIGHT, Got.MISSING, Got.REJECTED, Got.LEFT_BELOW}
"""Outcomes that a second look would not change."""


class Store:
    """One process's part of the store. All methods are thread-safe.

    Use it as a context manager, or call ``close``.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Starts the engine, lends memory if ``Config.memory`` says so, and looks for others.

        Raises what ``te.Engine`` raises; ``ValueError`` for a directory that is not safe, or an
        index that cannot be used; ``OSError`` if there is not enough memory.
        """
        self._config = Config() if config is None else config
        self._gets: Counter[str] = Counter()
        self._puts: Counter[str] = Counter()
        self._lookups: Counter[str] = Counter()
        self._bytes_got = self._bytes_put = 0
        with contextlib.ExitStack() as undo:
            members, host = meet(self._config)
            undo.callback(members.close)
            engine = replace(self._config.engine, keys=members.data_keys, host=host)
            self._engine = undo.enter_context(te.Engine(engine))
            self._memory = Memory(self._engine)
            self._rooms = HeaderRooms(self._engine)
            self._copier = Copier()
            undo.callback(self._copier.close)
            self.judging: Final = Judging()
            self._owners = Owners(self._engine, self._config, members, self.judging)
            undo.callback(self._owners.close)
            self._engine.add_answers({QUESTION: lambda _: self.status()})
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything; what this process has lent is gone. Idempotent."""
        self._undo.close()

    # -- memory

    def register(self, memory: Any, nbytes: int | None = None) -> te.Region:
        """Registers memory that objects are read into or stored from: a buffer, or an address and
        a size in bytes. Peers get no rights to it. Raises ``te.RegistrationError``."""
        return self._memory.register(memory, nbytes)

    def deregister(self, region: te.Region) -> None:
        """Undoes ``register``. See ``te.Engine.deregister`` for what it raises."""
        self._memory.deregister(region)

    # -- look-ups

    def exists(self, keys: Keys, signature: bytes, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which objects are stored, as far as this process knows at the moment. Asks nobody.

        Args:
            keys: shape (n, 16), as ``changes.keys_of_hex`` makes them.
            signature: ``Signature.digest``.
            nbytes: the size of each object.
        """
        places = self._owners.look_up(keys, form_of(signature, nbytes))
        found: npt.NDArray[np.bool_] = places["found"] == Found.HERE
        self._count_lookups(found, places["found"] == Found.OTHER)
        return found

    def known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """``exists`` for who does not know the signature or the size yet: whether a key is stored
        with any. A get tells whether it is with the right ones."""
        places = self._owners.look_up(keys, ANY_FORM)
        found: npt.NDArray[np.bool_] = places["found"] != Found.MISSING
        self._count_lookups(found, np.zeros_like(found))
        return found

    def judge(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        compute_s: float | None,
        *,
        probe: bool = False,
    ) -> Judged:
        """As ``exists``, for who needs objects from the first one on and could compute them, which
        takes ``compute_s`` for one; None if that is not known. How many of them are stored, and how
        many of these are worth loading."""
        sources = self._run(keys, signature, nbytes, count=True)
        return self.judging.judge(sources, nbytes, compute_s, probe)

    def expected_s(self, keys: Keys, signature: bytes, nbytes: int) -> float | None:
        """How long loading these objects takes; None while that is not known."""
        return self.judging.expected_s(self._run(keys, signature, nbytes, count=False), nbytes)

    def _run(self, keys: Keys, signature: bytes, nbytes: int, *, count: bool) -> Numbers:
        """The sources of the objects before the first one that is not stored."""
        places = self._owners.look_up(keys, form_of(signature, nbytes))
        found: npt.NDArray[np.bool_] = places["found"] == Found.HERE
        if count:
            self._count_lookups(found, places["found"] == Found.OTHER)
        sources: Numbers = source_of(places["owner"], places["slot"] == BELOW)
        return sources if found.all() else sources[: int(found.argmin())]

    # -- objects

    def get(
        self,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        timeout_s: float = 5.0,
    ) -> list[Got]:
        """Reads objects into registered memory; blocks. One outcome for each key.

        Nothing lands in the destination after this returns. The memory of an object that is not
        ``RIGHT`` may have any bytes.

        Raises:
            te.BoundsError: a destination is not registered.
            te.FenceTimeout: a read did not stop; the destination must not be used any more.
        """
        _check_shapes(keys, signature, destination)
        deadline_s = time.monotonic() + timeout_s
        self._owners.touch_soon(keys, signature, destination.object_bytes)
        outcomes = [Got.MISSING] * len(keys)
        open_rows: Sequence[int] = range(len(keys))
        form = form_of(signature, destination.object_bytes)
        failed: set[int] = set()
        is_readable = self._memory.is_readable(destination)
        at_once = self._config.verify and is_readable
        for _ in range(ATTEMPTS):
            ranks = bytearray(self._owners.ranks)
            for number in failed:
                ranks[number] = 0
            places = self._owners.look_up(keys[np.asarray(open_rows, np.intp)], form, bytes(ranks))
            found = self._groups(keys, signature, destination, open_rows, places, outcomes)
            near = [one for one in found if is_readable and one.source.window is not None]
            groups = [one for one in found if not (is_readable and one.source.window is not None)]
            try:
                for group in groups:
                    if at_once:
                        group.begin_with_headers(destination.of(group.rows), self._rooms)
                    else:
                        group.begin(destination.of(group.rows), 0)
                for group in near:
                    self._bring(group, destination, outcomes)
                for group in groups:
                    self.finish(group, destination, outcomes, deadline_s)
            except BaseException:
                _cancel(groups)
                raise
            if outcomes.count(Got.RIGHT) == len(keys):
                break
            open_rows = [row for row in open_rows if outcomes[row] not in SETTLED]
            if not open_rows or time.monotonic() > deadline_s:
                break
            at_once = (
                False  # Now it is told which bytes are wrong, and which were another object's.
            )
            failed.update(group.source.number for group in groups if group.failed is not None)
        below = [row for row, one in enumerate(outcomes) if one is Got.LEFT_BELOW]
        if below:
            self._get_below(keys, signature, destination, below, outcomes, deadline_s)
        self.count_gets(outcomes, destination.object_bytes)
        return outcomes

    def put(
        self, keys: Keys, signature: bytes, source: Pieces, timeout_s: float = 10.0
    ) -> list[Put]:
        """Stores objects out of registered memory; blocks. One outcome for each key.

        An object is either stored whole or not at all. The source must not change before this
        returns.

        Raises:
            te.BoundsError: a source is not registered.
        """
        _check_shapes(keys, signature, source)
        deadline_s = time.monotonic() + timeout_s
        outcomes = [Put.UNREACHABLE] * len(keys)
        if not len(keys):
            return outcomes
        for copy, rows, number in self._chosen(keys):
            some = source if len(rows) == len(keys) else source.of(rows)
            found = self._put_at(number, keys[rows], signature, some, deadline_s)
            if len(rows) == len(keys) and copy == 0:
                outcomes[:] = found
                continue
            for row, one in zip(rows.tolist(), found, strict=True):
                if copy == 0 or one is Put.STORED:
                    outcomes[row] = one
        _count(self._puts, outcomes, Put)
        self._bytes_put += outcomes.count(Put.STORED) * source.object_bytes
        return outcomes

    def remove(self, keys: Keys, signature: bytes) -> None:
        """Removes objects from every owner that can be used; those that do not answer keep them."""
        for number in self._owners.usable():
            handle = self._owners.handle(number)
            if handle is None:
                continue
            try:
                for first in range(0, len(keys), CLAIM_OBJECTS_MAX):
                    handle.remove(keys[first : first + CLAIM_OBJECTS_MAX], signature)
            except NoAnswer as exc:
                logger.warning("objects were not removed: %s", exc)

    def clear(self, signature: bytes) -> None:
        """Removes all objects of a signature from every owner that can be used; those that do not
        answer keep them."""
        for number in self._owners.usable():
            handle = self._owners.handle(number)
            if handle is not None:
                try:
                    handle.clear(signature)
                except NoAnswer as exc:
                    logger.warning("the objects of a signature were not removed: %s", exc)

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> list[Pinned]:
        """Keeps objects in memory: their owners do not evict them for so many seconds, or until as
        many ``unpin`` came as ``pin``. ``remove`` and ``clear`` remove them nevertheless. Pins are
        lost with the owner's process. Blocks; one outcome for each key.

        An owner refuses more than half of its memory. With several copies all that can be are
        pinned. ``ValueError`` for a time that is not between 1 ms and a day.
        """
        if not MIN_PIN_S <= ttl_s <= PIN_S_MAX:
            raise ValueError(f"ttl_s={ttl_s} must be between {MIN_PIN_S} and {PIN_S_MAX:g} seconds")
        outcomes = [Pinned.MISSING] * len(keys)
        for rows, handle in self._holders(keys):
            try:
                found, why = handle.pin(keys[rows], signature, ttl_s)
            except NoAnswer as exc:
                found, why = [Pinned.MISSING] * len(rows), str(exc)
            if why:
                logger.warning("not all objects were pinned: %s", why)
            for row, one in zip(rows.tolist(), found, strict=True):
                if outcomes[row] is not Pinned.PINNED and one is not Pinned.MISSING:
                    outcomes[row] = one
        return outcomes

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """Takes one pin from each of these objects, if they have one; those whose owner does not
        answer keep it until its time is over."""
        for rows, handle in self._holders(keys):
            try:
                handle.unpin(keys[rows], signature)
            except NoAnswer as exc:
                logger.warning("objects were not unpinned: %s", exc)

    def _holders(self, keys: Keys) -> Iterator[tuple[npt.NDArray[np.intp], Handle]]:
        """The owners that are said to have some of the keys with any signature, and which rows."""
        for number in self._owners.usable():
            held = self._owners.held_by(number, keys, ANY_FORM)
            rows = np.flatnonzero(held["found"] != Found.MISSING)
            handle = self._owners.handle(number) if len(rows) else None
            if handle is not None:
                for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
                    yield rows[first : first + CLAIM_OBJECTS_MAX], handle

    # -- how it is

    def status(self) -> StoreStatus:
        """What this process holds, knows and has done."""
        own = self._owners.own
        return StoreStatus(
            pid=os.getpid(),
            process=process_name(),
            memory=self._config.memory,
            own=None if own is None else own.stats(),
            owners=self._owners.seen(),
            gets=dict(self._gets),
            puts=dict(self._puts),
            lookups=dict(self._lookups),
            bytes_got=self._bytes_got,
            bytes_put=self._bytes_put,
            admission=self.judging.counts,
            table_bytes=self._owners.table.nbytes,
        )

    def __len__(self) -> int:
        """Objects that this process knows of, copies counted."""
        return len(self._owners.table)

    # -- gets, part by part (``kvstore.loading``)

    def locate(
        self, keys: Keys, signature: bytes, destination: Pieces
    ) -> tuple[list[Got], list[Group]]:
        """For ``Load``: outcomes of objects that are not found, and those that are, by owner."""
        _check_shapes(keys, signature, destination)
        self._owners.touch_soon(keys, signature, destination.object_bytes)
        outcomes = [Got.MISSING] * len(keys)
        places = self._owners.look_up(keys, form_of(signature, destination.object_bytes))
        rows = range(len(keys))
        return outcomes, self._groups(keys, signature, destination, rows, places, outcomes)

    def headers(self, group: Group, deadline_s: float) -> tuple[list[bool], list[int]]:
        """For ``Load``: which objects of a group still lie where they were looked up, and their
        checksums. What was read before is of them. May fail the group."""
        return group.check(self._rooms, deadline_s)

    def finish(
        self, group: Group, destination: Pieces, outcomes: list[Got], deadline_s: float
    ) -> None:
        """Waits for a group's reads and checks it; its rows get their outcome."""
        group.wait(deadline_s)
        right: list[bool] = []
        checksums: list[int] = []
        wrong = Got.CORRUPTED if group.room is None else Got.MOVED
        if group.failed is None:
            right, checksums = group.check(self._rooms, deadline_s)
        if group.failed is None:
            self.accept(group, destination, outcomes, right, checksums, wrong)
            return
        if group.failed is Got.UNREACHABLE and not group.source.peer.alive:
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
        right: Sequence[bool],
        checksums: Sequence[int],
        wrong: Got = Got.CORRUPTED,
    ) -> None:
        """For ``Load``: all bytes are there, and their headers were read behind them. Compares
        checksums; the rows get their outcome. ``wrong``: that of bytes with another checksum."""
        self._measure(group, destination)
        ours: Sequence[int] = checksums
        pieces = destination.of(group.rows)
        if self._config.verify and self._memory.is_readable(pieces):
            ours = self._copier.checksums(pieces).tolist()
        for row, is_right, said, found in zip(group.rows, right, checksums, ours, strict=True):
            outcomes[row] = Got.MOVED if not is_right else Got.RIGHT if found == said else wrong

    # -- how puts and gets go

    def _measure(self, group: Group, destination: Pieces) -> None:
        nbytes = len(group.rows) * destination.object_bytes
        self.judging.measured(group.source.number, group.took_s, nbytes)

    def _bring(self, group: Group, destination: Pieces, outcomes: list[Got]) -> None:
        """Copies a group out of memory of this host; its rows get their outcome."""
        window = group.source.window
        assert window is not None
        is_all = len(group.rows) == len(outcomes)
        pieces = destination if is_all else destination.of(group.rows)
        begun_s = time.monotonic()
        came = group.bring(pieces, window, self._copier, self._config.verify)
        took_s = time.monotonic() - begun_s
        self.judging.measured(group.source.number, took_s, len(came) * destination.object_bytes)
        if is_all:
            outcomes[:] = came
            return
        for row, one in zip(group.rows, came, strict=True):
            outcomes[row] = one

    def _count_lookups(self, found: npt.NDArray[np.bool_], rejected: npt.NDArray[np.bool_]) -> None:
        here, other = int(found.sum()), int(rejected.sum())
        self._lookups["found"] += here
        self._lookups["rejected"] += other
        self._lookups["missing"] += len(found) - here - other

    def count_gets(self, outcomes: Sequence[Got], nbytes: int) -> None:
        _count(self._gets, outcomes, Got)
        self._bytes_got += outcomes.count(Got.RIGHT) * nbytes

    def _get_below(
        self,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        rows: Sequence[int],
        outcomes: list[Got],
        deadline_s: float,
    ) -> None:
        """Reads objects that lie below, as far as their owners lift them: some at a time, as they
        push out each other. Ends after a few rounds that have brought nothing."""
        nbytes, barren = destination.object_bytes, 0
        while rows and barren < BARREN_MAX and time.monotonic() < deadline_s:
            begun_s, read = time.monotonic(), list[Group]()
            for row in rows:
                outcomes[row] = Got.MISSING
            parts = lifted_parts(self._owners, keys[list(rows)], signature, nbytes, deadline_s)
            with contextlib.closing(parts):
                for part, places in parts:
                    groups = self._groups(
                        keys, signature, destination, rows[part], places, outcomes
                    )
                    read += groups
                    self._read(groups, destination, outcomes, deadline_s)
            self._measure_below(read, outcomes, nbytes, time.monotonic() - begun_s)
            left = [row for row in rows if outcomes[row] in (Got.LEFT_BELOW, Got.MOVED)]
            barren = barren + 1 if len(left) == len(rows) else 0
            rows = left

    def _measure_below(
        self, groups: Sequence[Group], outcomes: Sequence[Got], nbytes: int, took_s: float
    ) -> None:
        """What lay below took the time of its lift, too. Owners lift one after the other."""
        right: Counter[int] = Counter()
        for group in groups:
            right[group.source.number] += sum(outcomes[row] is Got.RIGHT for row in group.rows)
        for number, count in right.items():
            if count:
                below = int(source_of(np.uint16(number), np.True_))
                self.judging.measured(below, took_s, count * nbytes)

    def _read(
        self,
        groups: Sequence[Group],
        destination: Pieces,
        outcomes: list[Got],
        deadline_s: float,
    ) -> None:
        """Reads whole objects; headers come behind them."""
        try:
            for group in groups:
                group.begin(destination.of(group.rows), 0)
            for group in groups:
                self.finish(group, destination, outcomes, deadline_s)
        except BaseException:
            _cancel(groups)
            raise

    def _chosen(self, keys: Keys) -> Iterator[tuple[int, npt.NDArray[np.intp], int]]:
        """Where the copies of objects go: which copy it is, their rows, an owner's number."""
        numbers = self._owners.usable()
        if len(numbers) == 1:
            yield 0, np.arange(len(keys), dtype=np.intp), numbers[0]
            return
        names, weights = self._owners.names_and_weights(numbers)
        own = numbers.index(OWN) if OWN in numbers else None
        chosen = np.array(numbers, np.intp)[
            choose(keys, names, weights, self._config.copies, own)
        ].reshape(len(keys), -1)
        for copy in range(chosen.shape[1]):
            for number in np.unique(chosen[:, copy]).tolist():
                yield copy, np.flatnonzero(chosen[:, copy] == number), number

    def _put_at(
        self, number: int, keys: Keys, signature: bytes, source: Pieces, deadline_s: float
    ) -> Sequence[Put]:
        """Stores objects at one owner, apart from those that it has."""
        held = self._owners.held_by(number, keys, form_of(signature, source.object_bytes))
        rows = np.flatnonzero(held["found"] != Found.HERE)
        handle = self._owners.handle(number) if len(rows) else None
        if handle is not None and len(rows) == len(keys) <= CLAIM_OBJECTS_MAX:
            return self._put_group(handle, keys, signature, source, deadline_s)
        outcomes = [Put.EXISTS] * len(keys)
        for first in range(0, len(rows), CLAIM_OBJECTS_MAX):
            some = rows[first : first + CLAIM_OBJECTS_MAX]
            found: Sequence[Put] = [Put.UNREACHABLE] * len(some)
            if handle is not None:
                found = self._put_group(handle, keys[some], signature, source.of(some), deadline_s)
            for row, one in zip(some.tolist(), found, strict=True):
                outcomes[row] = one
        return outcomes

    def _put_group(
        self, handle: Handle, keys: Keys, signature: bytes, source: Pieces, deadline_s: float
    ) -> Sequence[Put]:
        nbytes = len(keys) * source.object_bytes
        outcomes = None
        if nbytes <= handle.take_bytes_max and self._memory.is_readable(source):
            outcomes = put_at_once(handle, keys, signature, source, deadline_s)
        if outcomes is None:
            return put_group(handle, keys, signature, source, deadline_s)
        return outcomes

    def _groups(
        self,
        keys: Keys,
        signature: bytes,
        destination: Pieces,
        rows: Sequence[int],
        places: Records,
        outcomes: list[Got],
    ) -> list[Group]:
        """The rows that were found, by owner; the others get their outcome."""
        wanted = np.asarray(rows, np.intp)
        whole = places
        if len(places) < len(keys):
            whole = np.zeros(len(keys), PLACE)
            whole[wanted] = places
        for row in wanted[places["found"] == Found.OTHER].tolist():
            outcomes[row] = Got.REJECTED
        is_below = (places["found"] == Found.HERE) & (places["slot"] == BELOW)
        for row in wanted[is_below].tolist():
            outcomes[row] = Got.LEFT_BELOW
        found = wanted[(places["found"] == Found.HERE) & ~is_below]
        groups: list[Group] = []
        owners = whole["owner"][found]
        for number in sorted(set(owners.tolist())):
            of_owner = found[owners == number]
            source = self._owners.source(number)
            if source is None:
                for row in of_owner.tolist():
                    outcomes[row] = Got.UNREACHABLE
                continue
            for first in range(0, len(of_owner), HEADERS_MAX):
                some = of_owner[first : first + HEADERS_MAX].tolist()
                groups.append(
                    Group.of(source, some, keys, signature, destination.object_bytes, whole)
                )
        return groups


def _count(counts: Counter[str], outcomes: Sequence[Enum], kind: type[Enum]) -> None:
    """Adds outcomes to counts by their values. Hashing each would take longer than copying it."""
    for one in kind:
        if number := outcomes.count(one):
            counts[one.value] += number


def _cancel(groups: Sequence[Group]) -> None:
    """Ends reads under way, so that nothing lands after an exception."""
    for group in groups:
        group.cancel()


def _check_shapes(keys: Keys, signature: bytes, pieces: Pieces) -> None:
    if keys.ndim != 2 or keys.shape[1] != 16 or keys.dtype != np.uint8:
        raise ValueError(f"keys must be u8 of shape (n, 16), not {keys.dtype} of {keys.shape}")
    if len(signature) != 16:
        raise ValueError(f"signature has {len(signature)} bytes, not 16: give Signature.digest")
    if len(keys) != len(pieces):
        raise ValueError(f"{len(keys)} keys, but memory for {len(pieces)} objects")
