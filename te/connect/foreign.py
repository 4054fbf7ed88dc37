# SPDX-License-Identifier: Apache-2.0
"""Descriptors that a stranger has sent (SCM_RIGHTS in unix(7)): whoever closes the last of one does
what its kind wants, and closing a socket with SO_LINGER waits for as long as the stranger has said.

What is not taken is closed by the kernel all the same, in the thread that reads past it or closes
the connection. So everything is taken, and none of it lingers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final

__all__ = ["close_foreign", "drop_unread", "receive_descriptors"]

SCM_MAX_FD: Final = 253
"""Descriptors in one message; linux/net/scm.h."""

_DOES_NOT_LINGER: Final = struct.pack("ii", 0, 0)


def receive_descriptors(sock: socket.socket, nbytes: int) -> tuple[bytes, list[int]]:
    """The next bytes, and the descriptors that came with them; ``OSError``."""
    data, fds, _, _ = socket.recv_fds(sock, nbytes, SCM_MAX_FD, socket.MSG_CMSG_CLOEXEC)
    return data, fds


def drop_unread(sock: socket.socket) -> None:
    """Closes descriptors that were sent on a non-blocking connection and not received, before the
    connection is closed. The connection carries nothing any more."""
    with contextlib.suppress(OSError):  # The connection is empty, or broken.
        sock.shutdown(socket.SHUT_RDWR)
        data, fds = b"more", list[int]()
        while data:
            data, fds = receive_descriptors(sock, 4096)
            for fd in fds:
                close_foreign(fd)


def close_foreign(fd: int) -> None:
    """Closes a descriptor of somebody else's file without waiting."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:  # The descriptor is no socket.
        os.close(fd)
        return
    with sock, contextlib.suppress(OSError):  # Some sockets cannot linger.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DOES_NOT_LINGER)
