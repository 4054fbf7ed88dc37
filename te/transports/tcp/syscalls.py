# SPDX-License-Identifier: Apache-2.0
"""The few system calls on sockets, over memory that Python does not own.

Each exists twice: through ``CDLL``, which lets go of the interpreter lock, and through ``PyDLL``,
which keeps it. Beside a busy Python thread, taking the lock back costs up to 5 ms, so calls that
cannot block and move little keep it.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["IOVEC", "IOV_MAX", "Iovecs", "receive_into", "send_from", "wake"]

IOV_MAX: Final = 1024
"""Most iovecs the kernel takes in one call (UIO_MAXIOV)."""

IOVEC: Final = np.dtype([("base", "<u8"), ("nbytes", "<u8")])
"""``struct iovec`` of a 64-bit machine; readv(2)."""
assert ctypes.sizeof(ctypes.c_void_p) == 8

# 64 KiB is about 10 us of copying: less than handing the interpreter over and back.
KEEP_LOCK_BYTES: Final = 64 << 10
FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _Msghdr(ctypes.Structure):
    """``struct msghdr``; recvmsg(2)."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iov_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_Call = Callable[..., int]
_releasing = ctypes.CDLL(None, use_errno=True)
_keeping = ctypes.PyDLL(None, use_errno=True)


def _bind(library: Any, name: str, *argtypes: type) -> _Call:
    function = getattr(library, name)
    function.restype = ctypes.c_ssize_t
    function.argtypes = argtypes
    call: _Call = function
    return call


_MSG = (ctypes.c_int, ctypes.POINTER(_Msghdr), ctypes.c_int)
_BUF = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_sendmsg = (_bind(_keeping, "sendmsg", *_MSG), _bind(_releasing, "sendmsg", *_MSG))
_recvmsg = (_bind(_keeping, "recvmsg", *_MSG), _bind(_releasing, "recvmsg", *_MSG))
_send = _bind(_keeping, "send", *_BUF)
_recv = _bind(_keeping, "recv", *_BUF)
_eventfd_write = _bind(_keeping, "eventfd_write", ctypes.c_int, ctypes.c_uint64)


def _check(moved: int) -> int:
    if moved < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return moved


def receive_into(fd: int, room: memoryview) -> int:
    """recv(2) of a little, non-blocking; 0 at the end of the stream, ``OSError`` otherwise."""
    return _check(_recv(fd, _address(room), len(room), FLAGS))


def send_from(fd: int, data: bytearray) -> int:
    """send(2) of a little, non-blocking; ``OSError`` (``BlockingIOError``) when it cannot."""
    return _check(_send(fd, _address(memoryview(data)), len(data), FLAGS))


def wake(eventfd: int) -> None:
    """Makes an eventfd(2) readable."""
    _check(_eventfd_write(eventfd, 1))


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Iovecs:
    """Up to ``IOV_MAX`` ranges of memory that one segment is gathered from or scattered to, with
    the position reached. Reused from segment to segment; not safe for several threads."""

    def __init__(self) -> None:
        self._array = np.zeros(IOV_MAX, IOVEC)
        self._address: int = self._array.ctypes.data
        self._ends = np.zeros(0, np.uint64)
        self._first = 0
        self._moved = 0
        self._total = 0
        self._header = _Msghdr()
        self._pointer = ctypes.byref(self._header)

    @property
    def remaining(self) -> int:
        """Bytes still to move."""
        return self._total - self._moved

    def load(self, ranges: npt.NDArray[np.void]) -> None:
        """Starts over with ranges of shape (n,), two u64 fields (address, size >= 1)."""
        count = len(ranges)
        assert 0 < count <= IOV_MAX
        self._array[:count] = ranges
        self._ends = np.cumsum(self._array["nbytes"][:count])
        self._first = self._moved = 0
        self._total = int(self._ends[-1])

    def unload(self) -> None:
        """Forgets what is still to move."""
        self._moved = self._total

    def rest(self) -> npt.NDArray[np.void]:
        """A copy of the ranges still to move."""
        return self._array[self._first : len(self._ends)].copy()

    def send(self, fd: int) -> int:
        """sendmsg(2), non-blocking; bytes taken. ``OSError`` when none were."""
        return self._move(_sendmsg, fd)

    def receive(self, fd: int) -> int:
        """recvmsg(2), non-blocking; bytes landed, 0 at the end of the stream. ``OSError``."""
        return self._move(_recvmsg, fd)

    def _move(self, calls: tuple[_Call, _Call], fd: int) -> int:
        self._header.iov = self._address + self._first * IOVEC.itemsize
        self._header.iov_count = len(self._ends) - self._first
        call = calls[self.remaining > KEEP_LOCK_BYTES]
        moved = _check(call(fd, self._pointer, FLAGS))
        self._advance(moved)
        return moved

    def _advance(self, moved: int) -> None:
        self._moved += moved
        self._first = int(np.searchsorted(self._ends, self._moved, side="right"))
        if self._first < len(self._ends):
            part = self._array[self._first]
            left = int(self._ends[self._first]) - self._moved
            part["base"] += part["nbytes"] - np.uint64(left)
            part["nbytes"] = left
