# SPDX-License-Identifier: Apache-2.0
"""The process at the other end of a unix socket, and whom this one lets read its memory.

A process number says little: it is another's once its process has ended, while a child may have
kept the connection. So a link holds a descriptor of the process (pidfd_open(2)), which tells.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "Process",
    "Readers",
    "common_ancestor",
    "may_look_here",
    "parent_of",
    "peer_pid",
    "peer_process",
]

_UCRED = struct.Struct("iII")
_SO_PEERPIDFD: Final = 77
_PR_SET_PTRACER: Final = 0x59616D61
_PR_GET_DUMPABLE: Final = 3
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_ANCESTORS_MAX: Final = 64
_FDINFO_BYTES: Final = 4096
_INVISIBLE: Final = "the other process is not visible from here (another pid namespace)"


@dataclass(frozen=True)
class Process:
    """A process as seen from here. Whoever has it closes it."""

    pid: int
    pidfd: int

    def lives(self) -> bool:
        """Whether the number is still its own."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.pidfd)


def peer_pid(sock: socket.socket) -> int:
    """Process id of the other side as seen from here; 0 if it cannot be seen."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[0])


def peer_process(sock: socket.socket) -> Process | str:
    """The process that connected, or listens; or why that cannot be known.

    The kernel has a descriptor of the very process (Linux 6.5), which tells its number. Before
    that one is found by the number, which could be another's by now: what shows that it is not is
    a look into its memory (``te.transports.samehost.reach.cannot_read``).
    """
    pid = peer_pid(sock)
    if pid <= 0:
        return _INVISIBLE
    try:
        try:
            pidfd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError as exc:
            if exc.errno != errno.ENOPROTOOPT:
                raise
            return Process(pid, os.pidfd_open(pid))
        return _process_of(pidfd)
    except OSError as exc:
        return f"no descriptor of process {pid}: {exc.strerror}"


def may_look_here(sock: socket.socket) -> bool:
    """Whether the process that listens may read all memory of this one by its user alone
    (ptrace(2), "access mode checking"): root, or the same user where this process can be dumped.
    Asked here, as one that says so itself may lie. A capability of another user's process does not
    show."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, gid = _UCRED.unpack(raw)
    return uid == 0 or (
        set(os.getresuid()) == {uid}
        and set(os.getresgid()) == {gid}
        and ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    )


def _process_of(pidfd: int) -> Process | str:
    """What a descriptor says of its process (proc_pid_fdinfo(5)): takes it over."""
    try:
        # Without a text file around it: that takes longer than all else of a greeting.
        info = os.open(f"/proc/self/fdinfo/{pidfd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            said = os.read(info, _FDINFO_BYTES)
        finally:
            os.close(info)
        pid = next(int(line.split()[1]) for line in said.splitlines() if line.startswith(b"Pid:"))
    except BaseException:
        os.close(pidfd)
        raise
    if pid > 0:
        return Process(pid, pidfd)
    os.close(pidfd)
    return "the other process has ended" if pid < 0 else _INVISIBLE


def parent_of(pid: int) -> int:
    """0 if there is none, or it cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def common_ancestor(pids: Collection[int], parent_of: Callable[[int], int]) -> int | None:
    """The nearest process that all of them are, or descend from; None if that is the first of all,
    from which everybody descends."""
    lines: list[list[int]] = []
    for pid in pids:
        line: list[int] = []
        while pid > 1 and len(line) < _ANCESTORS_MAX:
            line.append(pid)
            pid = parent_of(pid)
        lines.append(line)
    return next((pid for pid in lines[0] if all(pid in line for line in lines)), None)


def _set_ptracer(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Readers:
    """Whom Yama's restricted mode lets read the memory of this process, beside its ancestors.

    It has room for one process, which stands for its descendants, too (PR_SET_PTRACER in prctl(2)):
    for one peer that is the peer itself, for several the nearest ancestor that they share, such as
    the server whose ranks they are. Never everybody. Any thread may call anything.
    """

    def __init__(
        self, scope: Path = _YAMA, set_ptracer: Callable[[int], None] = _set_ptracer
    ) -> None:
        self._scope = scope
        self._set_ptracer = set_ptracer
        self._lock = threading.Lock()
        #: Descriptors of those that were let in, by number.
        self._pidfds: dict[int, int] = {}

    def allow(self, pid: int) -> str | None:
        """Lets a process read this one's memory, if it takes a word for that; or why it cannot."""
        if pid == os.getpid():
            return None
        try:
            if self._scope.read_text().strip() != "1":
                return None
        except OSError:
            return None  # No Yama.
        with self._lock:
            self._forget_dead()
            others = [one for one in self._pidfds if one != pid]
            ancestor = common_ancestor([pid, *others], parent_of)
            if ancestor is None:
                return (
                    f"Yama lets only one process read this one's memory, and process {pid} shares"
                    f" no ancestor but the first with {', '.join(map(str, others)) or 'itself'};"
                    " sysctl kernel.yama.ptrace_scope=0 lifts that"
                )
            try:
                if pid not in self._pidfds:
                    self._pidfds[pid] = os.pidfd_open(pid)
                self._set_ptracer(ancestor)
            except OSError as exc:
                return (
                    f"process {pid} cannot get the right to read this one's memory: {exc.strerror}"
                )
        return None

    def _forget_dead(self) -> None:
        for pid, pidfd in tuple(self._pidfds.items()):
            if not Process(pid, pidfd).lives():
                del self._pidfds[pid]
                os.close(pidfd)
