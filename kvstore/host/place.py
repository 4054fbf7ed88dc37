# SPDX-License-Identifier: Apache-2.0
"""Where the owner of a host is found: a lock that it holds as long as it lives, and a socket, both
in the directory of the store. Whoever has the lock is the owner, or starts it and gives it the
lock: so there is never more than one. The kernel gives the lock back, however the process ends.

The lock's file has the name of the memory, from when objects may be in it until the owner has ended
by itself.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Final

from te.forking import let_go_in_child

__all__ = ["Lock", "Place"]

_NAME: Final = re.compile(rb"[0-9a-f]{32}")


class Lock:
    """The right to be the owner. It ends with the last process that has its descriptor: those that
    this one forks or starts do not, unless it is passed to them."""

    def __init__(self, fd: int) -> None:
        """``fd``: of the lock's file, locked."""
        self.fd = fd
        os.set_inheritable(fd, False)
        let_go_in_child(self)

    def memory(self) -> str:
        """The name of the memory that an owner had, which did not end by itself; empty if there is
        none."""
        raw = os.pread(self.fd, 64, 0)
        return raw.decode() if _NAME.fullmatch(raw) else ""

    def note(self, memory: str) -> None:
        """This memory may have objects from now on; empty: none has."""
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, memory.encode(), 0)

    def close(self) -> None:
        """This process does not need it any more. Idempotent."""
        fd, self.fd = self.fd, -1  # First: the number is soon another file's, in a child, too.
        if fd >= 0:
            os.close(fd)

    let_go = close


class Place:
    """In a directory that this user alone may enter (``directory.Directory``)."""

    def __init__(self, directory: Path) -> None:
        self.directory: Final = directory
        self.socket: Final = directory / "owner"
        #: For the questions of its users: ``kvstore.protocol.calling``.
        self.calls: Final = directory / "owner.calls"
        self.log: Final = directory / "owner.log"
        self._lock: Final = directory / "owner.lock"

    def lock(self) -> Lock | None:
        """None if another process has it. ``OSError`` if its file cannot be opened."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._lock, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return Lock(fd)

    @property
    def sockets(self) -> tuple[Path, Path]:
        """Of the owner."""
        return self.socket, self.calls

    def clear(self) -> None:
        """Removes the sockets of a former owner; for the one that has the lock."""
        for one in self.sockets:
            one.unlink(missing_ok=True)
