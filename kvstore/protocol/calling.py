# SPDX-License-Identifier: Apache-2.0
"""Asks an owner of the same host over a Unix socket, and reads the memory that it lends without
asking.

Each connection has a *tray*: memory that the client writes objects to, and the owner takes them
from. An owner has a thread for each connection. So a question costs two changes of threads, and a
put of small objects one question.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from kvstore.memory.slab import UNIT_BYTES
from kvstore.objects.headers import HEADER_BYTES
from kvstore.protocol.asking import NoAnswer
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import (
    CALL_BYTES_MAX,
    TRAY_BYTES,
    VERSION,
    Answer,
    Greet,
    Hello,
    Question,
    Refused,
    decode_answer,
    encode,
)

__all__ = ["Caller", "Line", "Window"]

LINES_MAX: Final = 4
"""Connections to one owner, each for one thread at a time."""


@dataclass(frozen=True)
class Window:
    """What an owner lends, in this process's memory."""

    headers_address: int
    slots_address: int
    #: From there on.
    slots_nbytes: int
    #: Keeps it there; None for memory of this process.
    mapped: Mapped | None = None

    def has(self, slot: int, nbytes: int) -> bool:
        """Whether an object lies in it; the number of its slot may be anything."""
        return (
            slot * UNIT_BYTES + nbytes <= self.slots_nbytes
            and (slot + 1) * HEADER_BYTES <= self.slots_address - self.headers_address
        )


class Line:
    """One connection, and its tray. For one thread at a time."""

    def __init__(self, path: str, name: str, timeout_s: float) -> None:
        """Connects and greets; ``NoAnswer``."""
        self._name = name
        self._room = bytearray(CALL_BYTES_MAX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        until_s = time.monotonic() + timeout_s
        try:
            self._wait_until(until_s)
            self._socket.connect(path)
            self.tray, fd = Mapped.make(TRAY_BYTES)
            try:
                socket.send_fds(self._socket, [encode(Greet(VERSION))], [fd])
            finally:
                os.close(fd)
            self._wait_until(until_s)
            raw, fds, _, _ = socket.recv_fds(
                self._socket, CALL_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
            try:
                hello = self._greeted(raw)
                self.engine: Final = hello.engine
                self.window: Final = _window(hello, fds)
            finally:
                for one in fds:
                    os.close(one)
        except (OSError, ValueError) as exc:
            self._socket.close()
            raise NoAnswer(f"owner {name} cannot be called: {exc}") from exc
        except NoAnswer:
            self._socket.close()
            raise

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """The answer. ``NoAnswer``, after which a late answer may come: the line must be closed.
        Without any time left nothing is asked."""
        until_s = time.monotonic() + timeout_s
        try:
            self._wait_until(until_s)
            self._socket.send(encode(question))
            self._wait_until(until_s)
            count = self._socket.recv_into(self._room)
        except TimeoutError:
            raise NoAnswer(f"owner {self._name} does not answer in time") from None
        except OSError as exc:
            raise NoAnswer(f"owner {self._name} cannot be called: {exc}") from exc
        return self._read(memoryview(self._room)[:count])

    def _wait_until(self, until_s: float) -> None:
        """For the next call of the socket. ``TimeoutError`` if it is over."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it does not answer in time")
        self._socket.settimeout(left_s)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()

    def _read(self, raw: bytes | memoryview) -> Answer:
        if not len(raw):
            raise NoAnswer(f"owner {self._name} has ended the connection")
        try:
            return decode_answer(raw)
        except msgspec.DecodeError as exc:
            raise NoAnswer(f"owner {self._name} answers what cannot be read: {exc}") from exc

    def _greeted(self, raw: bytes) -> Hello:
        hello = self._read(raw)
        if isinstance(hello, Refused):
            raise NoAnswer(f"owner {self._name}: {hello.why}")
        if not isinstance(hello, Hello):
            raise NoAnswer(f"owner {self._name} greets with {type(hello).__name__}")
        return hello


class Caller:
    """Calls one owner; from any thread."""

    def __init__(self, path: str, name: str, engine: bytes, timeout_s: float) -> None:
        """Connects. ``NoAnswer``, also if the owner has another engine than this one of its card:
        what this process knows is of another start of it."""
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        self._is_closed = False
        line = Line(path, name, timeout_s)
        if line.engine != engine:
            line.close()
            raise NoAnswer(f"owner {name} has been started anew")
        self.window: Final = line.window
        self._idle = [line]
        self._lines = 1

    @property
    def alive(self) -> bool:
        """Whether it is worth calling; False after an owner has not answered."""
        return not self._is_closed

    def ask(self, question: Question, timeout_s: float) -> Answer | None:
        """The answer; None if other threads have all lines. ``NoAnswer``."""
        until_s = time.monotonic() + timeout_s
        with self._line(timeout_s) as line:
            return None if line is None else self._answer(line, question, until_s)

    def ask_with_tray(
        self, fill: Callable[[int], None], question: Question, timeout_s: float
    ) -> Answer | None:
        """As ``ask``; ``fill`` writes to the tray before, and gets its address."""
        until_s = time.monotonic() + timeout_s
        with self._line(timeout_s) as line:
            if line is None:
                return None
            fill(line.tray.address)
            return self._answer(line, question, until_s)

    def close(self) -> None:
        """Ends the lines that nobody uses at the moment; the others end with their use."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def _answer(self, line: Line, question: Question, until_s: float) -> Answer:
        answer = line.ask(question, until_s - time.monotonic())
        if isinstance(answer, Refused):
            raise NoAnswer(f"owner {self._name}: {answer.why}")
        return answer

    @contextmanager
    def _line(self, timeout_s: float) -> Iterator[Line | None]:
        with self._lock:
            if self._is_closed:
                raise NoAnswer(f"the connections to owner {self._name} were ended")
            line = self._idle.pop() if self._idle else None
            is_new = line is None and self._lines < LINES_MAX
            self._lines += is_new
        try:
            if is_new:
                line = Line(self._path, self._name, timeout_s)
            yield line
        except BaseException:
            if line is not None:
                line.close()  # Whatever it still answers is not waited for.
            if line is not None or is_new:
                with self._lock:
                    self._lines -= 1
            raise
        if line is None:
            return
        with self._lock:
            if not self._is_closed:
                self._idle.append(line)
                return
        line.close()


def _window(hello: Hello, fds: list[int]) -> Window | None:
    """None if the owner's memory cannot be shared, such as that in a file on a disk."""
    if not fds:
        return None
    mapped = Mapped(fds[0])
    slots = hello.slots_address - hello.headers_address
    if not 0 < slots < mapped.nbytes:
        raise ValueError(f"its slots begin at {slots} of {mapped.nbytes} bytes")
    return Window(mapped.address, mapped.address + slots, mapped.nbytes - slots, mapped)
