# SPDX-License-Identifier: Apache-2.0
"""The memory an engine may read from and peers may write to."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from te.blocks import ADDRESS_LIMIT
from te.core.engine import Engine as Plane
from te.core.wire import MAY_READ, MAY_WRITE_TAGGED, MAY_WRITE_UNTAGGED, RANGES_LIMIT
from te.errors import FenceTimeout, RegistrationError
from te.memory_kinds import Export, MemoryKind, Reach, kind_of
from te.memory_kinds.ring import Ring
from te.topology import ANYWHERE
from te.verbs.fabric import Fabric, Registration

__all__ = ["RIGHTS", "Region", "RegionTable", "Remote", "described"]

Remote = Literal["tagged", "read", "read-tagged", "read-write", "none"]
"""What peers may do in a region: ``Engine.register`` explains each."""

logger = logging.getLogger(__name__)

RIGHTS: Final[dict[Remote, int]] = {
    "tagged": MAY_WRITE_TAGGED,
    "read": MAY_READ,
    "read-tagged": MAY_READ | MAY_WRITE_TAGGED,
    "read-write": MAY_READ | MAY_WRITE_TAGGED | MAY_WRITE_UNTAGGED,
    "none": 0,
}
"""The rights of peers in a region, by the value of ``remote``."""

LOCATION: Final = re.compile(r"\*|(cpu|cuda):\d+")


@dataclass(frozen=True, eq=False)
class Region:
    """A registered range of memory; compared by identity."""

    #: First byte, as a virtual address of this process.
    address: int
    #: Size in bytes, at least 1.
    nbytes: int
    #: The kind of memory: ``"host"``, ``"cuda:0"`` (``te.memory_kinds.MemoryKind.name``).
    kind: str
    #: Rises with each registration, so that a range registered twice is two regions.
    serial: int
    #: Keeps the buffer alive; None when the caller gave an address.
    owner: object = field(repr=False)
    #: How peers on this host map it; None if they cannot.
    export: Export | None = field(default=None, repr=False)
    #: What RDMA devices call it; None without such devices.
    registration: Registration | None = field(default=None, repr=False)
    #: The memory location, such as ``"cpu:0"``; ``"*"`` if it is not known or there is no RDMA
    #: device.
    location: str = ANYWHERE
    #: The rights of peers.
    remote: Remote = "tagged"

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes

    def __str__(self) -> str:
        return f"[{self.address:#x}, {self.end:#x}) of {self.nbytes} bytes"


#: Why an engine cannot move memory of a kind; see `RegionTable`.
Refusal = Callable[[MemoryKind, str | None], str | None]


def _nothing_refused(kind: MemoryKind, problem: str | None) -> None:
    """The engine can move memory of every kind."""


class RegionTable:
    """The regions of an engine; the plane has its own picture of them. Any thread may call
    anything."""

    def __init__(
        self,
        plane: Plane,
        fabric: Fabric | None,
        refusal: Refusal = _nothing_refused,
        ring: Ring | None = None,
    ) -> None:
        """``refusal`` says why the engine cannot move memory of a kind, which the devices have
        refused for that reason; None if it can, without them then. ``ring``: what memory is staged
        through."""
        self._plane = plane
        self._fabric = fabric
        self._refusal = refusal
        self._ring = ring
        self._lock = threading.Lock()
        # The kinds of all memory that was ever registered: the plane keeps their compiled halves.
        self._kinds: set[MemoryKind] = set()
        self._serials = itertools.count(1)
        # Regions that were deregistered while a landing had not ended: kept, so that nobody else
        # gets their memory.
        self._leaving: set[Region] = set()
        #: Sorted by address; replaced, never changed.
        self.regions: tuple[Region, ...] = ()

    def register(
        self,
        buffer_or_address: Any,
        nbytes: int | None,
        location: str | None = None,
        remote: Remote = "tagged",
    ) -> Region:
        """Adds a region; see ``Engine.register``."""
        if remote not in RIGHTS:
            raise RegistrationError(f"remote={remote!r} is none of {', '.join(RIGHTS)}")
        if location is not None and not LOCATION.fullmatch(location):
            raise RegistrationError(
                f"location={location!r} is not a memory location; give cpu:0, cuda:0 or *"
            )
        address, nbytes, owner = described(buffer_or_address, nbytes)
        if nbytes < 1:
            raise RegistrationError(f"a region needs at least one byte, not {nbytes}")
        if not 0 < address < ADDRESS_LIMIT or nbytes > ADDRESS_LIMIT - address:
            raise RegistrationError(f"{nbytes} bytes at {address:#x} are not an address range")
        kind = kind_of(address)
        kind.check(address, nbytes)
        with self._lock:
            other = self._overlapping(address, nbytes)
            if other is not None:
                raise RegistrationError(
                    f"[{address:#x}, {address + nbytes:#x}) of {nbytes} bytes"
                    f" overlaps the registered region {other}"
                )
            export = self._export(kind, buffer_or_address, address, nbytes, remote)
            self._make_ready(kind)
            known = self._with_devices(address, nbytes, RIGHTS[remote], kind, location)
            if known is not None:
                location = known.location
            serial = next(self._serials)
            place = location or ANYWHERE
            region = Region(address, nbytes, kind.name, serial, owner, export, known, place, remote)
            keys = b"" if known is None else known.keys
            is_shared = export is not None and Reach.KERNEL in kind.reach
            try:
                self._plane.add_region(
                    address, region.end, serial, kind.compiled, RIGHTS[remote], is_shared, keys
                )
            except ValueError as exc:
                if known is not None:
                    known.close()
                raise RegistrationError(str(exc)) from exc
            self._kinds.add(kind)
            self.regions = tuple(sorted((*self.regions, region), key=lambda one: one.address))
            return region

    def _export(
        self, kind: MemoryKind, source: object, address: int, nbytes: int, remote: Remote
    ) -> Export | None:
        """None if peers on this host have to copy it by other ways."""
        if remote == "none" and Reach.KERNEL in kind.reach:
            return None  # Peers could read by its file what they have no right to.
        try:
            return kind.export(source, address, nbytes)
        except OSError as exc:
            if Reach.KERNEL not in kind.reach and self._ring is not None:
                _say_not_mapped(f"{kind.description} of {kind.name}", exc.strerror or str(exc))
            return None

    def _with_devices(
        self, address: int, nbytes: int, rights: int, kind: MemoryKind, location: str | None
    ) -> Registration | None:
        """None without devices, also when the engine goes without them from now on. That they do
        not take the host's memory is an error: it is a limit that can be raised."""
        known, problem = None, None
        if self._fabric is not None:
            try:
                known = self._fabric.register(address, nbytes, rights, kind, location)
                self._check_ranges(address, nbytes, known)
            except RegistrationError as exc:
                if known is not None or Reach.KERNEL in kind.reach:
                    raise
                problem = str(exc)
        refusal = self._refusal(kind, problem)
        if refusal is not None:
            if known is not None:
                known.close()
            raise RegistrationError(
                f"{nbytes} bytes at {address:#x} are {kind.description}, {refusal}"
            )
        if problem is not None:
            self._fabric = None
        return known

    def _make_ready(self, kind: MemoryKind) -> None:
        """Where memory of the kind has to be staged."""
        if Reach.KERNEL in kind.reach or not kind.has_copier or self._ring is None:
            return
        try:
            self._ring.use(kind)
        except OSError as exc:
            raise RegistrationError(
                f"no host memory to stage {kind.description} through: {exc}"
            ) from exc

    def _check_ranges(self, address: int, nbytes: int, new: Registration) -> None:
        """A peer takes no more from anybody (``on_table`` in te/transports/rdma/outgoing.pyx)."""
        known = [one.registration for one in self.regions if one.registration is not None]
        count = sum(one.ranges for one in (*known, new))
        if count > RANGES_LIMIT:
            new.close()
            raise RegistrationError(
                f"with {nbytes} bytes at {address:#x} the devices would have {count} ranges of"
                f" memory; at most {RANGES_LIMIT} are allowed: register fewer and larger regions"
            )

    def deregister(self, region: Region, timeout_s: float) -> None:
        """Takes a region away; after it returns nothing lands there. See ``Engine.deregister``."""
        with self._lock:
            if region not in self.regions and region not in self._leaving:
                raise RegistrationError(f"the region {region} is not registered with this engine")
            readers = self._plane.remove_region(region.serial, timeout_s)
            if readers > 0:
                raise RegistrationError(
                    f"{readers} unfinished transfers read from the region {region}, after"
                    f" {timeout_s} s; cancel them, or wait until each has an outcome"
                )
            self.regions = tuple(one for one in self.regions if one is not region)
            self._leaving.discard(region)
            if readers < 0:
                self._leaving.add(region)
        if region.registration is not None:
            region.registration.close()
        if readers < 0:
            raise FenceTimeout(
                f"the region {region}: a landing did not end within {timeout_s} s; the memory must"
                " not be reused; call deregister again"
            )

    def close(self) -> None:
        """The devices forget all memory. No worker runs any more; ``te.RegistrationError``."""
        for region in (*self.regions, *self._leaving):
            if region.registration is not None:
                region.registration.close()
        self._refusal = _nothing_refused  # The engine's transports keep this table, and it them.

    @property
    def kinds(self) -> tuple[MemoryKind, ...]:
        """Of all memory that is, or was, registered. Any thread may ask."""
        with self._lock:
            return tuple(self._kinds)

    def mappers(self, handles: str) -> tuple[MemoryKind, ...]:
        """The kinds that map other processes' memory by such handles, of memory that is, or was,
        registered here."""
        kinds = () if self._ring is None else self._ring.kinds
        return tuple(kind for kind in kinds if kind.handles == handles)

    @property
    def trouble(self) -> str:
        """What kinds of memory that is staged say of their last copy that failed; empty if none."""
        return "" if self._ring is None else self._ring.trouble

    def complaint(self, address: int, nbytes: int) -> str:
        """The sentence for a range that is not registered."""
        text = f"{nbytes} bytes at {address:#x} lie outside the registered memory"
        regions = self.regions
        if not regions:
            return f"{text}; nothing is registered"
        near = min(regions, key=lambda region: _distance(region, address))
        return f"{text}; the nearest of {len(regions)} regions is {near}"

    def _overlapping(self, address: int, nbytes: int) -> Region | None:
        for region in (*self.regions, *self._leaving):
            if region.address < address + nbytes and address < region.end:
                return region
        return None


@functools.cache
def _say_not_mapped(what: str, why: str) -> None:
    """Once: the same holds for many regions."""
    logger.warning(
        "other processes on this host cannot map %s, which is staged then: %s", what, why
    )


def _distance(region: Region, address: int) -> int:
    return max(region.address - address, address - region.end, 0)


def described(source: Any, nbytes: int | None) -> tuple[int, int, object]:
    """Address, size and owner of what is handed to ``Engine.register``. ``RegistrationError`` if it
    is neither an address with a size nor a buffer that can be written."""
    if isinstance(source, (int, np.integer)):
        if nbytes is None:
            raise RegistrationError("an address needs nbytes")
        return int(source), nbytes, None
    try:
        view = memoryview(source)
    except TypeError:
        raise RegistrationError(
            f"register takes an address or a writable buffer, not {type(source).__name__}"
        ) from None
    if view.readonly:
        raise RegistrationError(f"the buffer of {type(source).__name__} is read-only")
    if not view.contiguous:
        raise RegistrationError(f"the buffer of {type(source).__name__} is not contiguous")
    if nbytes is not None and not 0 < nbytes <= view.nbytes:
        raise RegistrationError(f"{nbytes} bytes asked of a buffer of {view.nbytes} bytes")
    if not view.nbytes:
        raise RegistrationError("a region needs at least one byte, not 0")
    # The array exports the buffer, so that for example a bytearray cannot be resized meanwhile.
    owner = np.asarray(view)
    return owner.ctypes.data, view.nbytes if nbytes is None else nbytes, owner
