# SPDX-License-Identifier: Apache-2.0
"""Whether two engines share a kernel and may reach each other's memory; unix(7).

Engines listen on an abstract socket that is named after their id. Who can connect to it shares the
network namespace, the kernel tells each side the other's process id, and each reads a few bytes out
of the other's memory to see that it really may: that fails in separate process namespaces, for
another user, or under a policy (Yama, seccomp).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import struct
from typing import Final

from te.handshake import Card
from te.transports.samehost._core import (
    LOOK_TIMEOUT_S,
    NONCE_NBYTES,
    RINGS_NBYTES,
    read_process,
)
from te.transports.samehost.messages import Nonce
from te.transports.samehost.process import Process, Readers

__all__ = [
    "READERS",
    "NonceMemory",
    "cannot_read",
    "dial",
    "listen",
    "make_rings",
]

_TIMEVAL = struct.Struct("@ll")
_MADV_WIPEONFORK: Final = 18
_CURE: Final = (
    "; it takes the same user in both, a target that can be dumped (PR_SET_DUMPABLE), and Yama's"
    " kernel.yama.ptrace_scope at 1 or less, or CAP_SYS_PTRACE here; te doctor tells more"
)

READERS: Final = Readers()
"""The readers of this process: Yama counts by process, whatever engines it has."""


def _name(engine_id: str) -> str:
    return f"\0te-{engine_id}"


def listen(engine_id: str, backlog: int) -> socket.socket:
    """The non-blocking listening socket of an engine; ``OSError``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(engine_id))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def dial(card: Card, timeout_s: float) -> socket.socket:
    """A connection to the card's engine; ``OSError`` when it is not on this host."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Of a non-blocking connect(2) a full backlog is the end at once, not something to wait for.
        whole_s = int(timeout_s)
        timeout = _TIMEVAL.pack(whole_s, max(int((timeout_s - whole_s) * 1e6), 1))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        sock.connect(_name(card.id))
        sock.settimeout(timeout_s)
    except BlockingIOError:
        sock.close()
        raise TimeoutError from None
    except OSError:
        sock.close()
        raise
    return sock


def make_rings() -> int:
    """The descriptor of a memory file for the two rings of a rail; ``OSError``."""
    fd = os.memfd_create("te-rings", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, RINGS_NBYTES)
        # Neither side can make the other's reads and writes of it fail.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


class NonceMemory:
    """Random bytes at a known address of this process, in a page of their own that is zeros in a
    child (madvise(2), Linux 4.14): who reads them there reads this very process. ``OSError``."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._page.madvise(_MADV_WIPEONFORK)
        data = secrets.token_bytes(NONCE_NBYTES)
        self._page[:NONCE_NBYTES] = data
        self.nonce = Nonce(ctypes.addressof(ctypes.c_char.from_buffer(self._page)), data)


def cannot_read(process: Process, nonce: Nonce) -> str | None:
    """Why the memory of the process cannot be read from here; None if it can. Blocks for
    ``LOOK_TIMEOUT_S`` where that memory does not answer."""
    pid = process.pid
    try:
        found = read_process(pid, nonce.address, len(nonce.data), LOOK_TIMEOUT_S)
    except OSError as exc:
        problem = f"process_vm_readv of process {pid}: {exc.strerror}"
        return problem + _CURE if exc.errno == errno.EPERM else problem
    # In this order: the number was the process's own for as long as that lives.
    if not process.lives():
        return f"process {pid} has ended"
    if not secrets.compare_digest(found, nonce.data):
        return f"process {pid} is not the one that greets"
    return None
