# SPDX-License-Identifier: Apache-2.0
"""The store, as one process uses it: puts, gets and look-ups."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

import te
from kvstore.client.admission import Admitted, Numbers
from kvstore.client.deadline import Deadline
from kvstore.client.gets import Gets, Span
from kvstore.client.load_times import LoadTimes, source_of
from kvstore.client.managing import Managing
from kvstore.client.memory import Memory
from kvstore.client.pool import Pool, Version
from kvstore.client.puts import Puts
from kvstore.client.reading import HeaderRooms, StillLanding, stopped
from kvstore.client.status import QUESTION, OwnerSeen, StoreStatus
from kvstore.config import Config
from kvstore.host.directory import Directory
from kvstore.host.lease import Lease
from kvstore.host.managing import HostManaging
from kvstore.host.place import Place
from kvstore.host.pool import HostPool
from kvstore.objects.changes import (
    ANY,
    LOWER_TIER,
    OWNERS_MAX,
    Found,
    Keys,
    Records,
    fingerprint_of,
)
from kvstore.objects.copying import Copier
from kvstore.objects.outcomes import Got, Pinned, Put, Removed
from kvstore.objects.pieces import Pieces
from te.forking import Origin
from te.status import StatusSocket, process_name

__all__ = ["StillLanding", "Store", "stopped"]

logger = logging.getLogger(__name__)


class Store:
    """One process's part of the store. All methods are thread-safe.

    Use it as a context manager, or call ``close``.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Uses the owner of the host, and starts it if there is none: it lends ``Config.memory``.
        ``config``: without it, that of a process that wants nothing to be lent.

        Raises ``ValueError`` for a directory that is not safe, or a host's owner that is another
        one than the settings want, or cannot be started with them.
        """
        self._config = Config() if config is None else config
        self._origin = Origin()
        self._gets: Counter[str] = Counter()
        self._puts: Counter[str] = Counter()
        self._lookups: Counter[str] = Counter()
        self._bytes_got = self._bytes_put = 0
        self.load_times: Final = LoadTimes()
        self._owners: Pool
        self._managing: Managing
        self._memory: Memory
        with contextlib.ExitStack() as undo:
            self._open(undo)
            memory_used = self._memory
            self._rooms = HeaderRooms(lambda: memory_used.engine)
            self._copier = copier = Copier()
            undo.callback(copier.close)
            #: For ``Load``.
            self.gets: Final = Gets(
                self._owners,
                self._memory,
                self._rooms,
                copier,
                self.load_times,
                self._config.verify,
            )
            self._putting = Puts(self._owners, self._memory, self._config.copies, copier)
            self._undo = undo.pop_all()

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Joins the owner of the host: that one has the memory, and knows the others."""
        config = self._config
        directory = Directory(config.directory)
        undo.callback(directory.close)
        place = Place(config.directory)
        self._lease = Lease(config, place)
        undo.callback(self._lease.close)
        self._config = config.lending_nothing
        keys = config.keys.data if config.index else (directory.key(),)
        settings = replace(
            config.engine,
            keys=keys,
            status_dir=None,
            listens=False,
            port=0,
            port_last=None,
            workers=1,
        )
        self._memory = Memory(lambda: te.Engine(settings))
        undo.callback(self._memory.close)
        if config.engine.status_dir is not None:
            self._answer_status(config.engine.status_dir, undo)
        pool = HostPool(
            self._lease,
            place,
            self._memory,
            self.load_times,
            config.request_timeout_s,
            reads_far=not config.shared,
            puts_far=config.copies == 1,  # Copies are the owner's to count.
        )
        undo.callback(pool.close)
        self._owners, self._managing = pool, HostManaging(pool)

    def _answer_status(self, directory: Path, undo: contextlib.ExitStack) -> None:
        """As an engine does. It works without, too."""
        try:
            answers = {QUESTION: lambda _: self.status()}
            socket = StatusSocket(directory, secrets.token_hex(16), answers)
        except te.StatusSocketError as exc:
            logger.warning("kvstore top cannot ask this process how its store is: %s", exc)
        else:
            undo.callback(socket.close)

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
        """Ends everything. What the owner of the host has stays there; what this process has lent
        itself is gone. Idempotent. In a child of fork(2) it does nothing: all is the parent's."""
        if self._origin.is_here:
            self._undo.close()

    # -- memory

    def register(self, memory: Any, nbytes: int | None = None) -> te.Region:
        """Registers memory that objects are read into or stored from: a buffer, or an address and
        a size in bytes. Peers get no rights to it. Raises ``te.RegistrationError``."""
        region = self._memory.register(memory, nbytes)
        if isinstance(self._owners, HostPool):
            self._owners.connect_by_te()
        return region

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
        places = self._look_up(keys, signature, nbytes)
        found: npt.NDArray[np.bool_] = places["found"] == Found.HERE
        self._count_lookups(found, places["found"] == Found.OTHER)
        return found

    def known(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """``exists`` for who does not know the signature or the size yet: whether a key is stored
        with any. A get tells whether it is with the right ones."""
        places = self._owners.look_up(keys, ANY)
        found: npt.NDArray[np.bool_] = places["found"] != Found.MISSING
        self._count_lookups(found, np.zeros_like(found))
        return found

    def remembered(self, keys: Keys, signature: bytes, nbytes: int) -> npt.NDArray[np.bool_]:
        """``exists`` for who keeps a book of what is stored: also at owners that are silent at the
        moment, for as long as this process remembers them. Counts as no look-up."""
        places = self._owners.look_up(keys, fingerprint_of(signature, nbytes), b"\1" * OWNERS_MAX)
        here: npt.NDArray[np.bool_] = places["found"] == Found.HERE
        return here

    def keys(self, since: Version | None = None) -> tuple[Version, Keys] | None:
        """The keys that ``known`` finds, each once for each copy and signature, and the version of
        what this process knows; None if that is still ``since``, or changes too fast to be listed:
        ask again. None are listed while the host's owner cannot be asked. Takes about 10 ms for a
        million."""
        return self._owners.keys(since)

    def admit(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        compute_s: float | None,
        *,
        probe: bool = False,
    ) -> Admitted:
        """As ``exists``, for who needs objects from the first one on and could compute them, which
        takes ``compute_s`` for one; None if that is not known. How many of them are stored, and how
        many of these are worth loading."""
        sources = self._run(keys, signature, nbytes, count=True)
        return self.load_times.admit(sources, nbytes, compute_s, probe)

    def expected_s(self, keys: Keys, signature: bytes, nbytes: int) -> float | None:
        """How long loading these objects takes; None while that is not known."""
        return self.load_times.expected_s(self._run(keys, signature, nbytes, count=False), nbytes)

    def _look_up(self, keys: Keys, signature: bytes, nbytes: int) -> Records:
        ranks = self._owners.ranks_for(nbytes)
        return self._owners.look_up(keys, fingerprint_of(signature, nbytes), ranks)

    def _run(self, keys: Keys, signature: bytes, nbytes: int, *, count: bool) -> Numbers:
        """The sources of the objects before the first one that is not stored."""
        places = self._look_up(keys, signature, nbytes)
        found: npt.NDArray[np.bool_] = places["found"] == Found.HERE
        if count:
            self._count_lookups(found, places["found"] == Found.OTHER)
        sources: Numbers = source_of(places["owner"], places["slot"] == LOWER_TIER)
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
            StillLanding: a read did not stop in time; the destination must not be used before
                its ``wait`` has returned.
        """
        _check_shapes(keys, signature, destination)
        outcomes = self.gets.get(keys, signature, destination, time.monotonic() + timeout_s)
        self.conclude_gets(keys, signature, outcomes, destination.object_bytes)
        return outcomes

    def get_range(
        self,
        keys: Keys,
        signature: bytes,
        nbytes: int,
        offset: int,
        destination: Pieces,
        timeout_s: float = 5.0,
    ) -> list[Got]:
        """As ``get``, for a part of each object: as many bytes as the destination has, from
        ``offset`` on, of objects of ``nbytes``. Whoever reads a part cannot compare the checksum:
        bytes that have changed in memory are noticed by ``get`` alone.

        Raises what ``get`` raises, and ``ValueError`` for a part that goes beyond the object.
        """
        _check_shapes(keys, signature, destination)
        if not 0 <= offset <= nbytes - destination.object_bytes:
            raise ValueError(
                f"{destination.object_bytes} bytes from {offset} on are no part of an object of"
                f" {nbytes} bytes"
            )
        until_s = time.monotonic() + timeout_s
        outcomes = self.gets.get(keys, signature, destination, until_s, Span(nbytes, offset))
        self.conclude_gets(keys, signature, outcomes, destination.object_bytes)
        return outcomes

    def put(
        self,
        keys: Keys,
        signature: bytes,
        source: Pieces,
        timeout_s: float = 10.0,
        *,
        deadline: Deadline | None = None,
    ) -> list[Put]:
        """Stores objects out of registered memory; blocks. One outcome for each key.

        An object is either stored whole or not at all. The source must not change before this
        returns, unless ``deadline`` was ended before, which stands for ``timeout_s`` if it is
        given: what had not been copied or written whole by then is not stored.

        Raises:
            te.BoundsError: a source is not registered.
        """
        _check_shapes(keys, signature, source)
        until = Deadline(timeout_s) if deadline is None else deadline
        outcomes = self._putting.put(keys, signature, source, until)
        if self._config.copies > 1 and isinstance(self._owners, HostPool):
            stored = [row for row, one in enumerate(outcomes) if one in (Put.STORED, Put.EXISTS)]
            copies = self._config.copies
            self._owners.copy(keys[stored], signature, source.object_bytes, copies, until)
        _count(self._puts, outcomes, Put)
        self._bytes_put += outcomes.count(Put.STORED) * source.object_bytes
        return outcomes

    def remove(self, keys: Keys, signature: bytes) -> list[Removed]:
        """Removes objects from every owner that can be used; blocks. One outcome for each key.

        Waits ``Config.request_timeout_s`` for all owners together, for each ``CLAIM_OBJECTS_MAX``
        keys. All outcomes are ``UNREACHABLE`` if an owner that is known could not be asked, or
        the host has none at the moment.
        """
        return self._managing.remove(keys, signature)

    def clear(self, signature: bytes) -> int:
        """Removes all objects of a signature from every owner that can be used, and returns how
        many that were, copies counted; owners that do not answer keep them. Waits
        ``Config.request_timeout_s`` for all owners together."""
        return self._managing.clear(signature)

    def sizes(self, keys: Keys, signature: bytes) -> npt.NDArray[np.int64]:
        """The size of each object in bytes, for who does not know it; 0 for one that is not stored.
        Asks the owners that are said to have the keys; blocks."""
        return self._managing.sizes(keys, signature)

    def pin(self, keys: Keys, signature: bytes, ttl_s: float) -> list[Pinned]:
        """Keeps objects in memory: their owners do not evict them for so many seconds, or until as
        many ``unpin`` came as ``pin``. ``remove`` and ``clear`` remove them nevertheless. Pins are
        lost with the owner's process. Blocks; one outcome for each key.

        An owner refuses more than half of its memory. With several copies all that can be are
        pinned. ``ValueError`` for a time that is not between 1 ms and a day.
        """
        return self._managing.pin(keys, signature, ttl_s)

    def unpin(self, keys: Keys, signature: bytes) -> None:
        """Takes one pin from each of these objects, if they have one; those whose owner does not
        answer keep it until its time is over."""
        self._managing.unpin(keys, signature)

    # -- how it is

    def status(self) -> StoreStatus:
        """What this process holds, knows and has done."""
        return StoreStatus(
            pid=os.getpid(),
            process=process_name(),
            memory=0,
            own=None,
            owners=self._owners.seen(),
            gets=dict(self._gets),
            puts=dict(self._puts),
            lookups=dict(self._lookups),
            bytes_got=self._bytes_got,
            bytes_put=self._bytes_put,
            admission=self.load_times.counts,
            table_bytes=self._owners.table_bytes,
            label=self._config.engine.label,
        )

    def figures(self) -> StoreStatus:
        """``status`` for a monitoring system. One process of the host tells also what the owner
        holds, and all of them which other owners it knows; asks the owner, and waits
        ``Config.request_timeout_s`` at most."""
        status = self.status()
        return self._owners.with_owner(status) if isinstance(self._owners, HostPool) else status

    def ask_lenders(self) -> tuple[OwnerSeen, ...]:
        """The owners of other processes that lend memory, on this host and others, and whether they
        answer. Asks the host's owner, and waits ``Config.request_timeout_s`` at most; without an
        answer there are none."""
        return self._owners.lenders()

    @property
    def lenders(self) -> int:
        """How many owners lend memory that objects can be stored in now."""
        return sum(map(bool, self._owners.ranks_of_puts))

    @property
    def knows_all(self) -> bool:
        """Whether this process knows what all owners hold that were there when it last looked, half
        a second ago at most. One that does not answer is not known."""
        return self._owners.knows_all

    def __len__(self) -> int:
        """Objects that this process knows of, copies counted."""
        return len(self._owners)

    def _count_lookups(self, found: npt.NDArray[np.bool_], rejected: npt.NDArray[np.bool_]) -> None:
        here, other = int(found.sum()), int(rejected.sum())
        self._lookups["found"] += here
        self._lookups["rejected"] += other
        self._lookups["missing"] += len(found) - here - other

    def conclude_gets(
        self, keys: Keys, signature: bytes, outcomes: Sequence[Got], nbytes: int
    ) -> None:
        """For ``Load`` and ``get``: counts outcomes, and removes objects that are corrupted. Who
        looks these up would find them for ever, and right ones would not be stored."""
        right = outcomes.count(Got.RIGHT)
        self._bytes_got += right * nbytes
        _count(self._gets, outcomes, Got)
        if right == len(outcomes):
            return
        corrupted = [row for row, one in enumerate(outcomes) if one is Got.CORRUPTED]
        if corrupted:
            logger.warning(
                "%d objects have other bytes than were stored, and are removed", len(corrupted)
            )
            self._managing.remove_soon(keys[corrupted], signature)


def _count(counts: Counter[str], outcomes: Sequence[Enum], kind: type[Enum]) -> None:
    """Adds outcomes to counts by their values. Hashing each would take longer than copying it."""
    if len(outcomes) and outcomes.count(outcomes[0]) == len(outcomes):
        counts[outcomes[0].value] += len(outcomes)
        return
    for one in kind:
        if number := outcomes.count(one):
            counts[one.value] += number


def _check_shapes(keys: Keys, signature: bytes, pieces: Pieces) -> None:
    if keys.ndim != 2 or keys.shape[1] != 16 or keys.dtype != np.uint8:
        raise ValueError(f"keys must be u8 of shape (n, 16), not {keys.dtype} of {keys.shape}")
    if len(signature) != 16:
        raise ValueError(f"signature has {len(signature)} bytes, not 16: give Signature.digest")
    if len(keys) != len(pieces):
        raise ValueError(f"{len(keys)} keys, but memory for {len(pieces)} objects")
