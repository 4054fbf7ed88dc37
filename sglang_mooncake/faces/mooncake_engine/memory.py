# SPDX-License-Identifier: Apache-2.0
"""The memory that an engine of Mooncake's class has registered with te: the caller's, and what it
was asked to allocate ("managed")."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence
from typing import Final

import te

__all__ = ["Memory"]


class Memory:
    """Any thread may call anything. Sizes are in bytes."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        #: By their address, in the order in which they were registered. te's region keeps memory
        #: that was allocated here, and nothing else, as its ``owner``.
        self._regions: Final[dict[int, te.Region]] = {}

    @property
    def first_address(self) -> int:
        """Where the memory begins that was registered first; 0 if there is none."""
        with self._lock:
            return next(iter(self._regions), 0)

    def register(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """All of them or none, for peers to read and write. Where the memory is (which NUMA node,
        which GPU), te finds out. ``te.RegistrationError``, or ``ValueError`` if the lists differ
        in length."""
        if len(addresses) != len(sizes):
            raise ValueError(f"{len(addresses)} addresses and {len(sizes)} sizes")
        made: list[te.Region] = []
        try:
            for address, nbytes in zip(addresses, sizes, strict=True):
                made.append(self._engine.register(address, nbytes, remote="read-write"))
        except BaseException:
            while made:
                self._engine.deregister(made.pop())
            raise
        self._keep(made)

    def unregister(self, address: int) -> None:
        """What begins there. ``ValueError`` if that was not registered, or is managed; te's errors
        if a peer still uses it, and then it stays."""
        if self._region(address).owner is not None:
            raise ValueError(f"the memory at {address:#x} is managed: free_managed_buffer frees it")
        self._give_back(address)

    def allocate(self, nbytes: int) -> int:
        """Zeroed, and registered; the address. ``ValueError``, ``OSError`` or te's error if there
        is none."""
        if nbytes < 1:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        region = self._engine.register(mmap.mmap(-1, nbytes, private), remote="read-write")
        self._keep([region])
        return region.address

    def free(self, address: int, nbytes: int) -> None:
        """Memory that `allocate` gave. ``ValueError`` if it gave none there or of another size;
        te's errors if a peer still uses it, and then it stays."""
        region = self._region(address)
        if region.owner is None or region.nbytes != nbytes:
            raise ValueError(f"no {nbytes} bytes of managed memory begin at {address:#x}")
        self._give_back(address)

    def write(self, address: int, data: bytes, nbytes: int) -> None:
        """The first ``nbytes`` of ``data`` to memory of the host within one of the regions.
        ``ValueError`` for anything else."""
        if not isinstance(data, bytes):
            raise TypeError(f"bytes are written, not {type(data).__name__}")
        if len(data) < nbytes:
            raise ValueError(f"{nbytes} bytes of {len(data)} cannot be written")
        _kept = self._within(address, nbytes)
        ctypes.memmove(address, data, nbytes)

    def read(self, address: int, nbytes: int) -> bytes:
        """What is in memory of the host within one of the regions; else ``ValueError``."""
        _kept = self._within(address, nbytes)
        return ctypes.string_at(address, nbytes)

    def _keep(self, regions: Sequence[te.Region]) -> None:
        with self._lock:
            self._regions.update({one.address: one for one in regions})

    def _region(self, address: int) -> te.Region:
        with self._lock:
            region = self._regions.get(address)
        if region is None:
            raise ValueError(f"no registered memory begins at {address:#x}")
        return region

    def _give_back(self, address: int) -> None:
        self._engine.deregister(self._region(address))
        with self._lock:
            self._regions.pop(address, None)

    def _within(self, address: int, nbytes: int) -> te.Region:
        """Who has the region has its memory, if that is managed, even if it is freed meanwhile."""
        with self._lock:
            regions = list(self._regions.values())
        for region in regions:
            if nbytes >= 0 and region.address <= address <= address + nbytes <= region.end:
                if region.kind == "host":
                    return region
                raise ValueError(f"the memory at {address:#x} is of {region.kind}, not the host's")
        raise ValueError(f"{nbytes} bytes at {address:#x} lie outside the registered memory")
