# SPDX-License-Identifier: Apache-2.0
"""Ends the TCP connections between two servers of this host while both live, as a firewall or a NAT
box that forgets them does."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["sever"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_PIDFD_GETFD = 438  # Of every architecture; neither Python nor older C libraries have it.
_ESTABLISHED = "01"


def sever(one: int, other: int) -> int:
    """All of them, between the sessions of two processes.

    Returns:
        How many connections there were.

    Raises:
        OSError: a socket cannot be had: the process is another user's.
    """
    ours, theirs = _sockets(one), _sockets(other)
    rows = list(_connections())
    ends = {local for local, _, inode in rows if inode in theirs}
    between = [ours[inode] for _, remote, inode in rows if inode in ours and remote in ends]
    for pid, descriptor in between:
        _shut_down(pid, descriptor)
    return len(between)


def _sockets(leader: int) -> dict[int, tuple[int, int]]:
    """Process and descriptor of each socket of a session, by inode."""
    found: dict[int, tuple[int, int]] = {}
    for pid in _session(leader):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it is closed
                    if match := re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())):
                        found[int(match[1])] = pid, int(entry.name)
    return found


def _session(leader: int) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == os.getsid(leader):
                yield int(entry.name)


def _connections() -> Iterator[tuple[str, str, int]]:
    """Both ends and the inode of each."""
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            if state == _ESTABLISHED:
                yield local, remote, int(rest[5])


def _shut_down(pid: int, descriptor: int) -> None:
    process = os.pidfd_open(pid)
    try:
        copy = _LIBC.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:
        number = ctypes.get_errno()
        if number in (errno.EBADF, errno.ESRCH):
            return  # It is closed: often because another one has ended.
        raise OSError(number, f"socket {descriptor} of process {pid}: {os.strerror(number)}")
    with socket.socket(fileno=copy) as connection, suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)
