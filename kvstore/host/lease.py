# SPDX-License-Identifier: Apache-2.0
"""A process's use of the owner of its host: the owner stays for as long as somebody has one. If
there is none it is started; if it dies, so is another one, which takes its memory over.

A thread waits for the end of the connection, and does nothing before that, unless it is reminded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.client.deadline import Deadline
from kvstore.config import Config
from kvstore.host import agreement
from kvstore.host.lifetime import PAUSE_S, Attempts, HoldOff
from kvstore.host.messages import (
    BYTES_MAX,
    Farewell,
    Join,
    Joined,
    Refused,
    decode,
    encode,
)
from kvstore.host.place import Place
from kvstore.host.starting import Starting
from kvstore.protocol.messages import VERSION
from kvstore.protocol.users import check_user
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["Lease", "Refusal"]

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S: Final = 30.0
"""A process waits so long at its start until the owner is ready: it may have to look through much
memory, or the last owner may have to write much to a disk."""
CLOSE_TIMEOUT_S: Final = 10.0
REMINDER_S: Final = 0.1
"""So long behind the first reminder the thread does what it is reminded of."""


class Refusal(ValueError):
    """The owner of the host cannot be this process's, or cannot be started with its settings."""


class _Gone(Exception):
    """There is no owner, or it has ended the connection."""


@dataclass
class _Held:
    """The memory of the owner that this process joined last."""

    memory: str
    fd: int

    def close(self) -> None:
        """Gives the memory up."""
        os.close(self.fd)


class Lease:
    """From when it is made until ``close``."""

    def __init__(self, config: Config, place: Place) -> None:
        """Joins the owner, which is started if there is none. Waits ``JOIN_TIMEOUT_S`` at most: if
        it is not reached by then it is looked for on and on, behind this.

        Raises ``Refusal`` if that would be in vain.
        """
        self._config = config
        self._place = place
        self._line: socket.socket | None = None
        self._held: _Held | None = None
        #: How the owner was that this process joined last.
        self._was: dict[str, Any] = {}
        self._starting: Starting | None = None
        #: Whether the last owner was started by an operator, who starts the next one, too.
        self._is_service = False
        #: Whether an owner has given way to this process, which is to start the next one.
        self._is_next = False
        self._is_closing = False
        self._said = ""
        self._hold_off = HoldOff()
        self._unable = RateLimitedLog(logger)
        #: Of the owner that was joined last; 0: none yet. In containers the next one may have it.
        self.pid = 0
        #: How often an owner was joined, which tells one from the next.
        self.joins = 0
        #: Is called in the thread when another owner has been joined.
        self.on_join: Callable[[], object] = _nothing
        #: Is called in the thread some time after ``remind``, if there is an owner.
        self.on_reminder: Callable[[], object] = _nothing
        self._is_reminded = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._reminder_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._join_first()
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="kvstore-host", daemon=True)
        self._thread.start()

    @property
    def is_joined(self) -> bool:
        """Whether there is an owner, as far as this process knows."""
        return self._line is not None

    def remind(self) -> None:
        """Has ``on_reminder`` called. Costs nothing if that is to come anyway."""
        if not self._is_reminded and not self._is_closing:
            self._is_reminded = True
            os.eventfd_write(self._reminder_fd, 1)

    def close(self) -> None:
        """The owner is not needed any more. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} does not end")
        self._release()

    def _release(self) -> None:
        for one in (self._line, self._held, self._starting):
            if one is not None:
                one.close()
        os.close(self._wake_fd)
        os.close(self._reminder_fd)

    # -- joining

    def _join_first(self) -> None:
        deadline, attempts = Deadline(JOIN_TIMEOUT_S), Attempts(time.monotonic())
        while not deadline.is_over:
            if self._try(deadline.left_s):
                return
            is_awaited = self._is_next or self._starting is not None
            pause_s = attempts.pause_s(time.monotonic(), is_awaited=is_awaited)
            self._wait(None, min(pause_s, deadline.left_s))
        logger.warning(
            "the owner of this host's store does not answer within %g s: nothing is stored or"
            " loaded until it does%s",
            JOIN_TIMEOUT_S,
            self._said,
        )

    def _try(self, timeout_s: float) -> bool:
        """Joins, or has an owner started if there is none. ``Refusal``."""
        try:
            self._join(timeout_s)
        except _Gone as exc:
            self._said = f" ({exc})"
        else:
            return True
        if self._starting is not None:
            why = self._starting.failure()
            if why is not None:
                self._starting.close()
                self._starting = None
                self._is_next = False
                if why:
                    raise Refusal(why)
        # What an operator has ended he starts again; one without memory gives way to that.
        is_his = self._is_service and bool(self._config.memory)
        if self._starting is None and not is_his:
            try:
                self._start()
            # Such as too many open files, or an engine that needs a secret, which this process has
            # not: another one may start it.
            except (OSError, ValueError) as exc:
                self._said = f" ({exc})"
                self._unable.warn("the owner of this host's store cannot be started: %s", exc)
        return False

    def _start(self) -> None:
        """If this process gets the lock, and nobody else is to start it. ``OSError``;
        ``ValueError`` if it cannot have the settings of the last one."""
        lock = self._place.lock()
        may_start = self._hold_off.is_over(time.monotonic(), is_free=lock is not None)
        if lock is not None:
            try:
                was = {} if self._is_service else self._was
                if may_start:
                    self._starting = Starting(agreement.wished(self._config, was), lock)
            finally:
                lock.close()  # An owner that was started has it.

    def _join(self, timeout_s: float) -> None:
        """``_Gone``, ``Refusal``."""
        try:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        except OSError as exc:  # Too many open files.
            raise _Gone(str(exc)) from exc
        fds: list[int] = []
        try:
            line.connect(str(self._place.socket))
            check_user(line)
            held = self._held
            join = Join(VERSION, agreement.wishes(self._config), agreement.pool(self._config))
            if held is not None:
                join = Join(VERSION, join.wishes, join.pool, held.memory, self._was)
            socket.send_fds(line, [encode(join)], [] if held is None else [held.fd])
            self._wait(line, timeout_s)
            raw, fds, _, _ = socket.recv_fds(line, BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            if not raw:
                raise _Gone("it has ended the connection")
            self._joined(decode(raw), fds)
        except BlockingIOError as exc:
            line.close()
            raise _Gone("it does not answer in time") from exc
        except OSError as exc:
            line.close()
            raise _Gone(str(exc)) from exc
        except BaseException as exc:
            line.close()
            if isinstance(exc, ValueError) and not isinstance(exc, Refusal):
                raise _Gone(str(exc)) from exc
            raise
        finally:
            for one in fds:
                os.close(one)
        self._line = line

    def _joined(self, answer: object, fds: list[int]) -> None:
        if isinstance(answer, Refused):
            raise Refusal(
                f"the process {answer.pid} owns the store of this host, and {answer.why}; else"
                " give this process another directory, or end that one first"
            )
        if isinstance(answer, Farewell) and answer.gives_way:
            # Also behind an operator's owner: the one that was there in its stead has ended.
            self._is_service, self._is_next = False, True
            self._hold_off.end()
            self._was = {}
            raise _Gone("it gives way to this process")
        if not isinstance(answer, Joined):
            raise ValueError(f"it answers with {type(answer).__name__}")
        self._is_next = False
        if self._held is not None:
            self._held.close()
            self._held = None
        if fds:
            self._held = _Held(answer.memory, os.dup(fds[0]))
        if self._starting is not None:
            self._starting.close()
            self._starting = None
        self._is_service, self._was = answer.is_service, answer.has
        self.pid = answer.pid
        self.joins += 1
        logger.info("the process %d owns the store of this host", answer.pid)
        other = agreement.differences(agreement.wishes(self._config), answer.has)
        if other:
            logger.warning(
                "the store of this host was started with other settings, which count for all: %s",
                other,
            )

    # -- in the thread

    def _run(self) -> None:
        while not self._is_closing:
            try:
                if self._line is None:
                    self._join_again()
                else:
                    self._wait_for_end(self._line)
            except Exception:  # Without the thread, no owner is joined any more.
                logger.exception("a bug in the store: the owner of this host is looked for anew")
                self._wait(None, PAUSE_S)

    def _join_again(self) -> None:
        """Until an owner is joined, or this is to be closed."""
        attempts = Attempts(time.monotonic())
        while not self._is_closing:
            is_refused = False
            try:
                if self._try(JOIN_TIMEOUT_S):
                    self._call(self.on_join)
                    return
            except Refusal as exc:
                is_refused = True
                attempts.refused()
                logger.warning("the store of this host is not used: %s", exc)
            is_holding = self._held is not None and not is_refused
            is_awaited = is_holding or self._is_next or self._starting is not None
            self._wait(None, attempts.pause_s(time.monotonic(), is_awaited=is_awaited))

    def _wait_for_end(self, line: socket.socket) -> None:
        is_over = False
        while not (is_over or self._is_closing):
            is_over = self._wait(line, None, self._reminder_fd)
            if not is_over and not self._is_closing and self._was_reminded():
                is_over = self._wait(line, REMINDER_S)
                self._is_reminded = False
                self._call(self.on_reminder)
        if self._is_closing:
            return
        raw = b""
        with contextlib.suppress(OSError):
            raw = line.recv(BYTES_MAX)
        with contextlib.suppress(ValueError):
            farewell = decode(raw) if raw else None
            gives_way = isinstance(farewell, Farewell) and farewell.gives_way
            if isinstance(farewell, Farewell) and not gives_way:
                self._is_service = True
                logger.info("the owner of this host's store was ended")
            if gives_way:
                self._hold_off.gave_way(time.monotonic())
            elif self._is_service:
                self._hold_off.ended(time.monotonic())
        line.close()
        self._line = None
        logger.warning(
            "the owner of this host's store has ended: pages are computed until there is another"
        )

    def _was_reminded(self) -> bool:
        """Since the last time. Two threads may have reminded at once, and one of them late."""
        try:
            os.eventfd_read(self._reminder_fd)
        except BlockingIOError:
            return False
        return True

    def _call(self, back: Callable[[], object]) -> None:
        """The thread goes on: without it, no owner is joined any more."""
        try:
            back()
        except Exception:
            logger.exception("a bug in the store: the owner of this host is used in part")

    def _wait(self, line: socket.socket | None, timeout_s: float | None, *more: int) -> bool:
        """Until there is something to read, this is to be closed, or one of ``more`` descriptors is
        ready; whether there is something to read."""
        poll = select.poll()
        for one in (line, self._wake_fd, *more):
            if one is not None:
                poll.register(one, select.POLLIN)
        found = poll.poll(None if timeout_s is None else timeout_s * 1000)
        return line is not None and any(fd == line.fileno() for fd, _ in found)


def _nothing() -> None:
    """Of who does not want to know."""
