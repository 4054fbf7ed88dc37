# SPDX-License-Identifier: Apache-2.0
"""Network interfaces of the calling thread's namespace, changed by a system call: a program for it
would take longer than the shortest faults (netdevice(7), linux/sockios.h)."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from typing import Final

__all__ = ["down", "join", "leave", "up"]

_GET_FLAGS, _SET_FLAGS, _ADD_PORT, _REMOVE_PORT = 0x8913, 0x8914, 0x89A2, 0x89A3
_IS_UP: Final = 1
#: `struct ifreq`: a name, and a union of 24 bytes.
_FLAGS: Final = struct.Struct("16sH22x")
_INDEX: Final = struct.Struct("16si20x")


def up(name: str) -> None:
    _set_flags(name, lambda flags: flags | _IS_UP)


def down(name: str) -> None:
    _set_flags(name, lambda flags: flags & ~_IS_UP)


def join(bridge: str, port: str) -> None:
    _change(bridge, port, _ADD_PORT)


def leave(bridge: str, port: str) -> None:
    """The port keeps its link, and nothing passes any more."""
    _change(bridge, port, _REMOVE_PORT)


def _set_flags(name: str, changed: Callable[[int], int]) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        told = fcntl.ioctl(any_socket, _GET_FLAGS, _FLAGS.pack(name.encode(), 0))
        flags = changed(_FLAGS.unpack(told)[1])
        fcntl.ioctl(any_socket, _SET_FLAGS, _FLAGS.pack(name.encode(), flags))


def _change(bridge: str, port: str, request: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = _INDEX.pack(bridge.encode(), socket.if_nametoindex(port))
        fcntl.ioctl(any_socket, request, asked)
