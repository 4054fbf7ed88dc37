# SPDX-License-Identifier: Apache-2.0
"""The memory an engine may read from and peers may write to."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from te.blocks import ADDRESS_LIMIT, U64
from te.errors import BoundsError, RegistrationError

__all__ = ["HOST", "Hold", "Region", "RegionMap", "RegionTable"]

HOST: Final = "host"
"""Kind of a region of ordinary process memory."""


@dataclass(frozen=True, eq=False)
class Region:
    """A registered range of memory; compared by identity."""

    #: First byte, as a virtual address of this process.
    address: int
    #: Size in bytes, at least 1.
    nbytes: int
    #: What the memory is; ``"host"`` in this build.
    kind: str
    #: Rises with each registration, so that a range registered twice is two regions.
    serial: int
    #: Keeps the buffer alive; None when the caller gave an address.
    owner: object = field(repr=False)

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.address + self.nbytes

    def __str__(self) -> str:
        return f"[{self.address:#x}, {self.end:#x}) of {self.nbytes} bytes"


class RegionMap:
    """An immutable picture of the regions at one time, made for vectorised look-up.

    What counts is registered memory: a range may run over several regions that touch, because
    merging adjacent blocks makes such ranges out of blocks that each lie in one.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions = tuple(sorted(regions, key=lambda region: region.address))
        #: Highest serial: a region with a higher one was registered later.
        self.newest = max((region.serial for region in regions), default=0)
        self._starts = np.array([region.address for region in self.regions], np.uint64)
        ends = np.array([region.end for region in self.regions], np.uint64)
        # Spans: runs of touching regions.
        opens = np.ones(len(ends), bool)
        opens[1:] = ends[:-1] != self._starts[1:]
        self._span_starts = self._starts[opens]
        self._span_ends = ends[np.roll(opens, -1)]

    def check(self, address: U64, nbytes: U64) -> None:
        """Raises ``BoundsError`` for the first range, of shape (n,), that is not registered
        memory from end to end, naming it and what is registered nearby. Any u64 is safe here."""
        span = np.searchsorted(self._span_starts, address, side="right") - 1
        inside = span >= 0
        if inside.any():
            ends = self._span_ends[span]
            # Unsigned: ``ends - address`` may be used only where address <= ends.
            inside &= (address < ends) & (nbytes <= ends - np.minimum(address, ends))
        if not inside.all():
            first = int(inside.argmin())
            raise BoundsError(self._complaint(int(address[first]), int(nbytes[first])))

    def used(self, address: U64, nbytes: U64) -> list[Region]:
        """The regions that the ranges, which passed ``check``, have bytes in."""
        first = np.searchsorted(self._starts, address, side="right") - 1
        last = np.searchsorted(self._starts, address + nbytes - np.uint64(1), side="right") - 1
        size = len(self.regions) + 1
        covers = np.bincount(first, minlength=size) - np.bincount(last + 1, minlength=size)
        return [self.regions[index] for index in np.flatnonzero(np.cumsum(covers))]

    def up_to(self, serial: int) -> RegionMap:
        """The same without the regions that were registered after the one with the serial."""
        return RegionMap([region for region in self.regions if region.serial <= serial])

    def overlapping(self, address: int, nbytes: int) -> Region | None:
        """A region that shares a byte with the range, if there is one."""
        for region in self.regions:
            if region.address < address + nbytes and address < region.end:
                return region
        return None

    def _complaint(self, address: int, nbytes: int) -> str:
        text = f"{nbytes} bytes at {address:#x} lie outside the registered memory"
        if not self.regions:
            return f"{text}; nothing is registered"
        near = min(self.regions, key=lambda region: _distance(region, address))
        return f"{text}; the nearest of {len(self.regions)} regions is {near}"


@dataclass(frozen=True)
class Hold:
    """Regions that an unfinished write reads from; deregister refuses them."""

    serials: tuple[int, ...]


class RegionTable:
    """The regions of an engine. Any thread may call anything.

    ``map`` is replaced, never changed: whoever validated against one map compares identities to
    learn that something was registered or deregistered since.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serials = itertools.count(1)
        self._readers: dict[int, int] = {}
        self.map = RegionMap(())

    def register(self, buffer_or_address: Any, nbytes: int | None) -> Region:
        """Adds a region; see ``Engine.register``."""
        address, nbytes, owner = _describe(buffer_or_address, nbytes)
        if nbytes < 1:
            raise RegistrationError(f"a region needs at least one byte, not {nbytes}")
        if not 0 < address < ADDRESS_LIMIT or nbytes > ADDRESS_LIMIT - address:
            raise RegistrationError(f"{nbytes} bytes at {address:#x} are not an address range")
        _check_mapped(address, nbytes)
        with self._lock:
            other = self.map.overlapping(address, nbytes)
            if other is not None:
                raise RegistrationError(
                    f"[{address:#x}, {address + nbytes:#x}) of {nbytes} bytes"
                    f" overlaps the registered region {other}"
                )
            region = Region(address, nbytes, HOST, next(self._serials), owner)
            self.map = RegionMap((*self.map.regions, region))
            return region

    def deregister(self, region: Region) -> None:
        """Takes a region out of ``map``; landings that began before may still be under way."""
        with self._lock:
            if region not in self.map.regions:
                raise RegistrationError(f"the region {region} is not registered with this engine")
            readers = self._readers.get(region.serial, 0)
            if readers:
                raise RegistrationError(
                    f"{readers} unfinished transfers read from the region {region};"
                    " wait for them or cancel them first"
                )
            self.map = RegionMap([other for other in self.map.regions if other is not region])

    def hold(self, address: U64, nbytes: U64) -> Hold:
        """Checks that the ranges are registered (``BoundsError``) and keeps them so."""
        with self._lock:
            self.map.check(address, nbytes)
            serials = tuple(region.serial for region in self.map.used(address, nbytes))
            for serial in serials:
                self._readers[serial] = self._readers.get(serial, 0) + 1
            return Hold(serials)

    def release(self, hold: Hold) -> None:
        """Ends a hold; exactly once for each."""
        with self._lock:
            for serial in hold.serials:
                self._readers[serial] -= 1
                if not self._readers[serial]:
                    del self._readers[serial]


def _distance(region: Region, address: int) -> int:
    return max(region.address - address, address - region.end, 0)


def _describe(source: Any, nbytes: int | None) -> tuple[int, int, object]:
    """Address, size and owner of what was handed to ``register``."""
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


def _check_mapped(address: int, nbytes: int) -> None:
    """Raises unless every byte is mapped readable and writable; proc_pid_maps(5).

    Asked of the kernel's list rather than by touching pages: it also knows about protection, and
    a pool of a hundred GB costs no more than a page.
    """
    reached, end = address, address + nbytes
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, access = line.split(" ", 2)[:2]
            low, high = (int(part, 16) for part in span.split("-"))
            if high <= reached:
                continue
            if low > reached or not access.startswith("rw"):
                break
            reached = high
            if reached >= end:
                return
    raise RegistrationError(
        f"[{address:#x}, {end:#x}) of {nbytes} bytes is not readable and writable memory of this"
        f" process from {max(reached, address):#x} on"
    )
