# SPDX-License-Identifier: Apache-2.0
"""The owner's side: who uses it, and how long it stays."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

from kvstore.host import agreement
from kvstore.host.lifetime import Adoption, Presence
from kvstore.host.messages import (
    BYTES_MAX,
    Farewell,
    Join,
    Joined,
    Refused,
    decode,
    encode,
)
from kvstore.host.place import Lock, Place
from kvstore.memory.memory_file import MemoryFile
from kvstore.protocol.messages import VERSION
from kvstore.protocol.users import check_user
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["Brought", "Hosting"]

logger = logging.getLogger(__name__)

USERS_MAX: Final = 4096


@dataclass(frozen=True)
class Brought:
    """The memory of the last owner, and how that one was (``agreement.wishes``)."""

    fd: int
    name: str
    was: dict[str, Any]


class Hosting:
    """Listens for those who want to use the owner. For one thread, apart from ``end``."""

    def __init__(self, place: Place, lock: Lock, pool: list[str], linger_s: float | None) -> None:
        """``linger_s``: None for an owner that an operator has started, and ends. ``OSError`` if it
        cannot listen."""
        self._place = place
        self._lock = lock
        self._pool = pool
        self._is_service = linger_s is None
        now_s = time.monotonic()
        self._presence = Presence(math.inf if linger_s is None else linger_s, now_s)
        self._adoption = Adoption(lock.memory(), now_s)
        self._brought: Brought | None = None
        self._strange = RateLimitedLog(logger)
        self._has: dict[str, Any] | None = None
        self._memory: MemoryFile | None = None
        self._is_ending = self._is_closed = self._gives_way = False
        #: Those who have asked before the owner was ready.
        self._waiting: dict[socket.socket, Join] = {}
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        place.clear()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(place.socket))
            self._listener.listen(USERS_MAX)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)

    # -- in order

    def adopt(self) -> Brought | None:
        """Waits until somebody brings the memory of the last owner; None if that one has left
        nothing behind, or nobody does in time. Its descriptor is the caller's."""
        while not self._is_ending and (left_s := self._adoption.left_s(time.monotonic())):
            self._turn(left_s)
        brought, self._brought = self._brought, None
        return brought

    def ready(self, has: dict[str, Any], memory: MemoryFile | None) -> None:
        """From now on it can be used.

        Args:
            has: how it is (``agreement.wishes``).
            memory: what a next owner can take over.
        """
        self._lock.note("" if memory is None else memory.name)
        self._has, self._memory = has, memory
        self._adoption.took()  # It is too late for that.
        waiting, self._waiting = self._waiting, {}
        for line, join in waiting.items():
            self._answer(line, join)

    def run(self) -> None:
        """Until ``end``, or until nobody has used it for long enough."""
        while not self._is_ending and (left_s := self._presence.left_s(time.monotonic())):
            self._turn(left_s)

    def close(self, *, is_left: bool) -> None:
        """Nobody gets in any more. ``is_left``: the memory stays for the next owner, if somebody
        holds it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._place.clear()
        if not is_left:
            self._lock.note("")
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                with contextlib.suppress(OSError):
                    is_told = self._is_service or self._gives_way
                    if is_told and key.fileobj is not self._listener:
                        key.fileobj.send(encode(Farewell(self._gives_way)))
                key.fileobj.close()
        self._selector.close()
        os.close(self._wake_fd)

    @property
    def users(self) -> int:
        """How many processes use it."""
        return len(self._presence)

    def wake_on(self, fd: int) -> None:
        """``adopt`` and ``run`` look whether they are to end, once ``fd`` can be read, which stays
        the caller's and stays open until ``close``."""
        self._selector.register(fd, selectors.EVENT_READ)

    def end(self) -> None:
        """Ends ``adopt`` and ``run``. From a signal's handler, also behind ``close``: the number of
        the descriptor may be a file's then. From other threads before ``close`` alone."""
        self._is_ending = True
        if not self._is_closed:
            os.eventfd_write(self._wake_fd, 1)

    # -- one turn

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(None if math.isinf(timeout_s) else timeout_s):
            if key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._read(key.fileobj)

    def _accept(self) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError as exc:
            self._strange.warn("a process of this host cannot be let in: %s", exc)
            time.sleep(0.1)  # Such as for a descriptor.
            return
        line.setblocking(False)
        try:
            check_user(line)
            if len(self._selector.get_map()) > USERS_MAX:
                raise ValueError(f"{USERS_MAX} others use this one already")
        except ValueError as exc:
            self._strange.warn("a process of this host is not let in: %s", exc)
            line.close()
            return
        self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: socket.socket) -> None:
        fds: list[int] = []
        try:
            raw, fds, _, _ = socket.recv_fds(line, BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            if not raw:
                self._drop(line)
                return
            message = decode(raw)
            if not isinstance(message, Join):
                raise ValueError(f"it says {type(message).__name__}")
            self._asked(line, message, fds)
        except BlockingIOError:
            return
        except (OSError, ValueError) as exc:
            self._strange.warn("the connection of a process of this host is ended: %s", exc)
            self._drop(line)
        finally:
            for one in fds:
                os.close(one)

    def _asked(self, line: socket.socket, join: Join, fds: list[int]) -> None:
        is_ours = join.version == VERSION and not agreement.refusal(self._pool, join.pool)
        if is_ours and self._adoption.wants(join.memory) and fds:
            self._adoption.took()
            self._brought = Brought(os.dup(fds[0]), join.memory, join.was)
        if self._has is None:
            self._waiting[line] = join
        else:
            self._answer(line, join)

    def _answer(self, line: socket.socket, join: Join) -> None:
        assert self._has is not None
        why = agreement.refusal(self._pool, join.pool)
        if join.version != VERSION:
            why = f"it is of another release (version {VERSION} of the store's messages)"
        is_less = join.takes_over or agreement.gives_way(self._has, join.wishes)
        is_less = is_less and not self._is_service
        owner, other = (join.wishes, self._has) if is_less else (self._has, join.wishes)
        why = why or agreement.unencrypted(owner, other)
        if is_less and not why:
            # It starts the one that all others use then.
            self._gives_way = self._is_ending = True
            return
        fds = [] if self._memory is None or why else [self._memory.readable_fd]
        name = "" if self._memory is None else self._memory.name
        answer = Joined(os.getpid(), self._has, name, self._is_service)
        try:
            socket.send_fds(line, [encode(Refused(os.getpid(), why) if why else answer)], fds)
        except OSError as exc:
            self._strange.warn("a process of this host has gone: %s", exc)
            self._drop(line)
            return
        if not why:
            self._presence.came(line.fileno())

    def _drop(self, line: socket.socket) -> None:
        self._presence.went(line.fileno(), time.monotonic())
        self._waiting.pop(line, None)
        self._selector.unregister(line)
        line.close()
