# SPDX-License-Identifier: Apache-2.0
"""te/core/staging.pxd from Python: its functions, called without the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from te_compiled import address_in, function
from te_sealed import capsule

from te.core import kinds

__all__ = [
    "COPIED",
    "COPYING",
    "FREE",
    "HELD",
    "HOST_KIND",
    "HandKind",
    "Lane",
    "Slot",
    "Staging",
    "struct_of",
]

FREE, HELD, COPYING, COPIED = range(4)
# Both are opaque here; the real ones are smaller.
STAGING_BYTES = 64 << 10
LANE_BYTES = 256


def struct_of(compiled: object) -> int:
    """The address of the ``Kind`` in a capsule."""
    return address_in(compiled, b"te.memory_kind.2")


HOST_KIND = struct_of(kinds.HOST)


class Span(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_void_p), ("at", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class SlotHead(ctypes.Structure):
    """What users of a slot read."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("fault", ctypes.c_int),
        ("state", ctypes.c_uint32),
    )


_function = functools.partial(function, "te.core.staging")


_P, _U64, _U32, _INT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
_open = _function("staging_open", _INT, _P, _U64, _U64, _U64)
_close = _function("staging_close", _INT, _P)
_take = _function("lane_take", _P, _P, _P)
_leave = _function("lane_leave", None, _P, _P)
_give = _function("lane_give", None, _P, _P)
_drop = _function("lane_drop", None, _P, _P)
_next = _function("staging_next", _P, _P)
_scarce = _function("staging_is_scarce", _INT, _P)
_copying = _function("staging_copying", _U32, _P)
_gather = _function("slot_gather", None, _P, _P, _P, _U32, _P, _P)
_scatter = _function("slot_scatter", None, _P, _P, _P, _U32, _P, _P)
_poll = _function("staging_poll", _U32, _P)
_mark = _function("staging_mark", _U64, _P)
_ended = _function("staging_ended", _INT, _P, _U64, _P, _P)

Range = tuple[int, int, int]
"""(kind, address, bytes)"""
Spans = Sequence[Range]


class Slot:
    def __init__(self, ring: Staging, address: int) -> None:
        self._ring = ring
        self.address = address
        self._head = SlotHead.from_address(address)

    @property
    def state(self) -> int:
        return int(self._head.state)

    @property
    def fault(self) -> int:
        assert self.state == COPIED
        return int(self._head.fault)

    @property
    def nbytes(self) -> int:
        return int(self._head.nbytes)

    @property
    def number(self) -> int:
        """Which one of the ring."""
        return int(self._head.base - self._ring.base) // self._ring.slot_bytes

    @property
    def view(self) -> np.ndarray[Any, Any]:
        """Its memory: the whole of it."""
        at = int(self._head.base) - self._ring.base
        return self._ring.memory[at : at + self._ring.slot_bytes]

    def gather(self, spans: Spans, link: int = 0, right: int = 0) -> None:
        self._begin(_gather, spans, link, right)

    def scatter(self, spans: Spans, link: int = 0, right: int = 0) -> None:
        self._begin(_scatter, spans, link, right)

    def _begin(self, function: Any, spans: Spans, link: int, right: int) -> None:
        array = (Span * max(len(spans), 1))(*spans)
        function(self._ring.raw, self.address, array, len(spans), link, right)


class Lane:
    """Of one channel. ``owner`` is a number that ``Staging.next`` tells."""

    def __init__(self, ring: Staging, owner: int) -> None:
        self._ring = ring
        self._raw = ctypes.create_string_buffer(LANE_BYTES)
        ctypes.c_void_p.from_buffer(self._raw).value = owner
        self.slots: list[Slot] = []

    def take(self) -> Slot | None:
        address = _take(self._ring.raw, self._raw)
        if address is None:
            return None
        self.slots.append(Slot(self._ring, address))
        self.slots[-1].view[:] = 0xEE  # What is sent without having been copied shows.
        return self.slots[-1]

    def leave(self) -> None:
        _leave(self._ring.raw, self._raw)

    def give(self) -> None:
        """The first slot."""
        self.slots.pop(0)
        _give(self._ring.raw, self._raw)

    def drop(self) -> None:
        self.slots.clear()
        _drop(self._ring.raw, self._raw)


class Staging:
    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.memory: np.ndarray[Any, Any] = np.frombuffer(
            mmap.mmap(-1, slots * slot_bytes), np.uint8
        )
        self.base: int = self.memory.ctypes.data
        self.raw = ctypes.create_string_buffer(STAGING_BYTES)
        problem = self.open(slots * slot_bytes, slot_bytes)
        assert problem == 0

    def open(self, nbytes: int, slot_bytes: int) -> int:
        return int(_open(self.raw, self.base, nbytes, slot_bytes))

    def close(self) -> bool:
        return bool(_close(self.raw))

    def poll(self) -> int:
        return int(_poll(self.raw))

    def next(self) -> int | None:
        """The lane whose turn it is."""
        owner: int | None = _next(self.raw)
        return owner

    @property
    def is_scarce(self) -> bool:
        return bool(_scarce(self.raw))

    @property
    def copying(self) -> int:
        return int(_copying(self.raw))

    def mark(self) -> int:
        return int(_mark(self.raw))

    def ended(self, mark: int, link: int = 0, right: int = 0) -> bool:
        return bool(_ended(self.raw, mark, link, right))


_COPY = ctypes.CFUNCTYPE(_INT, _P, _P, _U32, _INT, ctypes.POINTER(_P))
_QUERY = ctypes.CFUNCTYPE(_INT, _P, _P)
_RELEASE = ctypes.CFUNCTYPE(None, _P, _P)


class Ops(ctypes.Structure):
    _fields_ = (
        ("copy", _COPY),
        ("query", _QUERY),
        ("release", _RELEASE),
        ("unmap", ctypes.c_void_p),
        ("flush", ctypes.c_void_p),
    )


class KindStruct(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.POINTER(Ops)),
        ("state", ctypes.c_void_p),
        ("touched_by", ctypes.c_uint32),
    )


class Copy(ctypes.Structure):
    _fields_ = (("dst", _U64), ("src", _U64), ("nbytes", ctypes.c_size_t))


class HandKind:
    """A kind that copies nothing: a test says by hand when which batch is over, and how."""

    def __init__(self) -> None:
        #: (destination, source, bytes) of each batch, by its event.
        self.batches: dict[int, list[tuple[int, int, int]]] = {}
        self._answers: dict[int, int] = {}
        self._count = 0
        #: The errno with which batches are not taken; 0: they are.
        self.refusal = 0
        self._ops = Ops(_COPY(self._copy), _QUERY(self._query), _RELEASE(self._release))
        self._struct = KindStruct(ctypes.pointer(self._ops), None, 0)
        self.struct = ctypes.addressof(self._struct)
        self.compiled = capsule(self.struct)

    @property
    def events(self) -> list[int]:
        """Not released yet, in the order in which they were begun."""
        return list(self.batches)

    def end(self, event: int, answer: int = 0) -> None:
        self._answers[event] = answer

    def _copy(self, state: int, copies: int, n: int, direction: int, event: Any) -> int:
        if self.refusal:
            return self.refusal
        self._count += 1
        array = (Copy * n).from_address(copies)
        self.batches[self._count] = [(one.dst, one.src, one.nbytes) for one in array]
        self._answers[self._count] = errno.EAGAIN
        event[0] = self._count
        return 0

    def _query(self, state: int, event: int) -> int:
        return self._answers[event]

    def _release(self, state: int, event: int) -> None:
        assert self._answers[event] != errno.EAGAIN
        del self.batches[event]
