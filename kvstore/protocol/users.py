# SPDX-License-Identifier: Apache-2.0
"""Whose process is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

__all__ = ["check_user"]

_CREDENTIALS: Final = struct.Struct("=iII")
"""struct ucred: process, user, group."""


def check_user(line: socket.socket) -> None:
    """``ValueError`` if the process at the other end of a Unix socket is another user's. The mode
    of the directory says so already; this holds if somebody changes it."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise ValueError(f"a process of the user {user} is at the other end")
