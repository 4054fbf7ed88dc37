# SPDX-License-Identifier: Apache-2.0
"""Whose process is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

__all__ = ["check_user", "pid_of"]

_CREDENTIALS: Final = struct.Struct("=iII")
"""struct ucred: process, user, group."""


def check_user(line: socket.socket) -> None:
    """``ValueError`` if the process at the other end of a Unix socket is another user's. The mode
    of the directory says so already; this holds if somebody changes it."""
    _, user = _credentials(line)
    if user != os.geteuid():
        raise ValueError(f"a process of the user {user} is at the other end")


def pid_of(line: socket.socket) -> int:
    """The process that listens at the other end of a Unix socket; 0 for one of another
    container."""
    return _credentials(line)[0]


def _credentials(line: socket.socket) -> tuple[int, int]:
    """Process and user."""
    raw = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
