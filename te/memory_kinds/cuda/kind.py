# SPDX-License-Identifier: Apache-2.0
"""The kind: which GPU's memory an address is, and what te does with it.

NICs take it as a dma-buf, or through nvidia-peermem; processes of one host map each other's; for
the kernel it is staged.
"""

from __future__ import annotations

import errno
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from te.core import kinds
from te.errors import RegistrationError
from te.memory_kinds.base import Export, Mapped, MemoryKind, Reach, TakeDescriptor
from te.memory_kinds.cuda import handles
from te.memory_kinds.cuda._copier import Copier, is_in_use
from te.memory_kinds.cuda._driver import Driver, find
from te.topology import ANYWHERE

__all__ = ["recognise_cuda"]

logger = logging.getLogger(__name__)


class _Cuda(MemoryKind):
    """Memory of one GPU. It keeps the GPU's context for as long as anybody has the kind."""

    description: ClassVar = "CUDA memory"
    reach: ClassVar = Reach.NIC
    handles: ClassVar = "cuda"

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """``ordinal``: CUDA's number of the GPU in this process."""
        self._driver = driver
        self._ordinal = ordinal
        self.name = f"cuda:{ordinal}"
        self._copier = _copier(driver, ordinal)
        self.has_copier = self._copier is not None
        can_flush = self._copier is not None and driver.flushes_writes(ordinal)
        if not driver.shows_writes(ordinal) and not can_flush:
            self.reach = Reach(0)  # type: ignore[misc]  # Nobody here can have them shown.
        self.compiled = kinds.NIC_ONLY if self._copier is None else self._copier.compiled

    @property
    def trouble(self) -> str:
        said = "" if self._copier is None else self._copier.trouble
        return f"{self.name}: {said}" if said else ""

    def check(self, address: int, nbytes: int) -> None:
        reached = end = address + nbytes
        if self._driver.ordinal_of(end - 1) != self._ordinal:
            reached = address
        elif self._copier is not None:  # Without a context the driver tells no more.
            try:
                reached = self._copier.mapped_until(address, end)
            except OSError as exc:
                raise RegistrationError(f"{nbytes} bytes at {address:#x}: {exc.strerror}") from exc
        if reached < end:
            raise RegistrationError(
                f"[{address:#x}, {end:#x}) of {nbytes} bytes begins in CUDA memory, but is not"
                f" all memory of {self.name}"
            )

    def location(self, address: int, gpus: Mapping[str, str]) -> str:
        """CUDA's own numbers are not the machine's: CUDA_VISIBLE_DEVICES."""
        return gpus.get(self._driver.pci_address(self._ordinal), ANYWHERE)

    def dma_buf(self, address: int, nbytes: int) -> int:
        """The driver's own error is in the text of the ``OSError``."""
        return self._driver.dma_buf(address, nbytes)

    def export(self, source: object, address: int, nbytes: int) -> Export:
        copier = self._copier
        if copier is None:
            raise OSError(errno.EOPNOTSUPP, f"the context of {self.name} is not te's")
        if handles.can_export_pieces(copier, address):
            return Export(self.handles, lambda: handles.pieces(copier, address, nbytes))
        part = handles.block(copier, address, nbytes)
        return Export(self.handles, lambda: iter((part,)))

    def map(self, handle: bytes, nbytes: int, take: TakeDescriptor) -> Mapped:
        """Maps memory of any GPU that this one reaches: its own, or a peer by NVLink or PCIe."""
        if self._copier is None:
            raise OSError(errno.EOPNOTSUPP, f"the context of {self.name} is not te's")
        return handles.map_exported(self._copier, handle, nbytes, take)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Pins memory once for all GPUs: what one of them has pinned is pinned for the others."""
        if self._copier is None or not self._copier.pin(address, nbytes):
            return lambda: None
        return functools.partial(_unpin, self._copier, address)


def _unpin(copier: Copier, address: int) -> None:
    """Nobody copies any more. In a broken context no call succeeds; the pages are then given back
    with that context, and nothing else is lost."""
    try:
        copier.unpin(address)
    except OSError as exc:
        logger.warning("the memory that was staged through stays pinned: %s", exc)


def _copier(driver: Driver, ordinal: int) -> Copier | None:
    """None where the memory belongs to a context of somebody's own."""
    if not is_in_use(driver, ordinal):
        return None
    try:
        return Copier(driver, ordinal)
    except OSError as exc:
        logger.warning("memory of GPU %d cannot be staged: %s", ordinal, exc)
        return None


_lock: Final = threading.Lock()
_known: Driver | None = None  # it stays loaded
_kinds: Final[weakref.WeakValueDictionary[int, _Cuda]] = weakref.WeakValueDictionary()


@functools.cache
def _say(problem: str) -> None:
    logger.warning("CUDA memory is not recognised: %s", problem)


def _driver() -> Driver | None:
    global _known
    with _lock:
        if _known is None:
            try:
                _known = find()
            except RuntimeError as exc:
                _say(str(exc))  # Once: this is asked for host memory, too.
        return _known


def recognise_cuda(address: int) -> MemoryKind | None:
    """The GPU's whose memory it is; None for any other, also for host memory that CUDA knows."""
    driver = _driver()
    ordinal = None if driver is None else driver.ordinal_of(address)
    if driver is None or ordinal is None:
        return None
    with _lock:
        kind = _kinds.get(ordinal)
        if kind is None:
            kind = _kinds[ordinal] = _Cuda(driver, ordinal)
        return kind
