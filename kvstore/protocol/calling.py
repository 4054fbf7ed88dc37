# SPDX-License-Identifier: Apache-2.0
"""Asks the owner of the host over a Unix socket, and reads the memory that it has without asking.

Each connection has a *tray*: memory that the client writes objects to, and the owner takes them
from. An owner has a thread for each connection. So a question costs two changes of threads, and a
put of small objects one question.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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
from kvstore.protocol.reach import NONCE_NBYTES
from kvstore.protocol.users import check_user
from te.forking import Origin, let_go_in_child

__all__ = ["Caller", "Line", "Window"]

LINES_MAX: Final = 4
"""Connections to one owner, each for one thread at a time."""
SLOW_MAX: Final = LINES_MAX - 1
"""Of them, for questions that the owner may have to ask other hosts or object storage for: puts on
this host do not wait for those."""
TELL_TIMEOUT_S: Final = 0.5
"""So long what is told waits for a line: under steady load each one is handed on, and none is ever
idle."""


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

    def __init__(
        self,
        path: str,
        name: str,
        timeout_s: float,
        map_table: Callable[[int], object],
        tray_bytes: int = TRAY_BYTES,
    ) -> None:
        """Connects and greets; ``NoAnswer``. ``map_table``: gets the descriptor of the owner's
        table. The owner may read this process's memory, if the system lets it
        (``Hello.reads``)."""
        self._name = name
        #: How many questions it has had, with those that were not sent whole.
        self.asked = 0
        self._room = bytearray(CALL_BYTES_MAX)
        self.tray_bytes: Final = tray_bytes
        until_s = time.monotonic() + timeout_s
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as exc:  # Too many open files.
            raise NoAnswer(f"owner {name} cannot be called: {exc}") from exc
        let_go_in_child(self)
        try:
            self._wait_until(until_s)
            self._socket.connect(path)
            check_user(self._socket)
            self.tray, fd = Mapped.make(tray_bytes + NONCE_NBYTES)
            greet = Greet(VERSION, self.tray.address)
            try:
                socket.send_fds(self._socket, [encode(greet)], [fd])
            finally:
                os.close(fd)
            self._wait_until(until_s)
            raw, fds, _, _ = socket.recv_fds(
                self._socket, CALL_BYTES_MAX, 2, socket.MSG_CMSG_CLOEXEC
            )
            try:
                hello = self.hello = self._greeted(raw)
                if not fds:
                    raise ValueError("it has sent no table")
                map_table(fds[0])
                self.window: Final = _window(hello, fds[1:])
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
        """The answer. ``NoAnswer``, after which a late answer may come: the line must be closed, if
        ``asked`` has risen. Without any time left nothing is asked."""
        until_s = time.monotonic() + timeout_s
        try:
            self._wait_until(until_s)
            self.asked += 1
            self._socket.send(encode(question))
            self._wait_until(until_s)
            count = self._socket.recv_into(self._room)
        except TimeoutError:
            raise NoAnswer(f"owner {self._name} does not answer in time") from None
        except OSError as exc:
            raise NoAnswer(f"owner {self._name} cannot be called: {exc}") from exc
        return self._read(memoryview(self._room)[:count])

    def tell(self, question: Question) -> None:
        """Asks what is not answered; left out if the owner does not read at the moment. ``OSError``
        if the connection has ended."""
        self.asked += 1
        self._socket.settimeout(0.0)  # With one, the socket's own poll would wait.
        with contextlib.suppress(BlockingIOError):
            self._socket.send(encode(question))

    def _wait_until(self, until_s: float) -> None:
        """For the next call of the socket. ``TimeoutError`` if it is over."""
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it does not answer in time")
        self._socket.settimeout(left_s)

    def close(self) -> None:
        """Ends it."""
        self._socket.close()

    def let_go(self) -> None:
        """In a child, which may outlive the parent: the parent's is not ended."""
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


class _Turn:
    """Of a thread that waits for a line."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow: Final = is_slow
        self.came: Final = threading.Event()
        #: Behind that: the line that was given back to it; None: it may make one.
        self.line: Line | None = None


class Caller:
    """Calls one owner; from any thread of the process that has made it. To a child of that it is
    closed: two processes on one line would take each other's answers, and an owner would read the
    parent's memory where the child's is meant."""

    def __init__(
        self,
        path: str,
        name: str,
        timeout_s: float,
        map_table: Callable[[int], object],
    ) -> None:
        """Connects. ``NoAnswer``. ``map_table``: see ``Line``."""
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        #: First come, first served: a line that is given back goes to the first of them, and not to
        #: the thread that asks again at once.
        self._turns: deque[_Turn] = deque()
        #: Lines with a slow question.
        self._slow = 0
        self._is_closed = False
        self._origin = Origin()
        line = Line(path, name, timeout_s, map_table)
        self.hello: Final = line.hello
        self.window: Final = line.window
        self._idle = [line]
        self._lines = 1
        let_go_in_child(self)

    @property
    def alive(self) -> bool:
        """Whether it is worth calling; False after an owner has not answered."""
        return not self._is_closed

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """The answer. ``NoAnswer``."""
        until_s = time.monotonic() + timeout_s
        with self.line(timeout_s) as line:
            return self.answer(line, question, until_s)

    def tell(self, questions: Iterable[Question]) -> None:
        """Asks what is not answered, and is left out if the owner cannot hear it now. Waits for a
        line, ``TELL_TIMEOUT_S`` at most."""
        with contextlib.suppress(NoAnswer, OSError), self.line(TELL_TIMEOUT_S) as line:
            for one in questions:
                line.tell(one)

    def close(self) -> None:
        """Ends the lines that nobody uses at the moment; the others end with their use."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            while self._turns:
                self._turns.popleft().came.set()
        for line in idle:
            line.close()

    def let_go(self) -> None:
        """In a child: it is closed. Another thread of the parent may have had the lock."""
        self._lock = threading.Lock()
        self._is_closed = True
        self._idle = []
        self._turns.clear()

    def answer(self, line: Line, question: Question, until_s: float) -> Answer:
        """As ``ask``, over a line that ``line`` has given."""
        answer = line.ask(question, until_s - time.monotonic())
        if isinstance(answer, Refused):
            raise NoAnswer(f"owner {self._name}: {answer.why}")
        return answer

    @contextmanager
    def line(self, timeout_s: float, nbytes: int = 0, *, is_slow: bool = False) -> Iterator[Line]:
        """For one question after another, with a tray for so many bytes; it is ended by what is
        raised behind a question. Waits until one is free. ``is_slow``: see ``SLOW_MAX``."""
        until_s = time.monotonic() + timeout_s
        line = self._take(timeout_s, is_slow)
        asked = -1
        try:
            if line is not None and line.tray_bytes < nbytes:
                line.close()
                line = None
            if line is None:
                tray = max(TRAY_BYTES, 1 << (nbytes - 1).bit_length() if nbytes else 0)
                left_s = until_s - time.monotonic()
                line = Line(self._path, self._name, left_s, _known, tray)
            asked = line.asked
            yield line
        except BaseException:
            if line is not None and line.asked != asked:
                line.close()  # Whatever it still answers is not waited for.
                line = None
            self._give_back(line, is_slow)
            raise
        self._give_back(line, is_slow)

    def _may_go(self, is_slow: bool) -> bool:
        return not is_slow or self._slow < SLOW_MAX

    def _give_back(self, line: Line | None, is_slow: bool) -> None:
        """None: there is a line less."""
        with self._lock:
            self._slow -= is_slow
            turn = next((one for one in self._turns if self._may_go(one.is_slow)), None)
            if turn is not None:
                self._turns.remove(turn)
                self._slow += turn.is_slow
                turn.line = line
                turn.came.set()
                return
            if line is None:
                self._lines -= 1
                return
            # They stay for as long as the process: one large tray is enough for one thread.
            is_spare = line.tray_bytes > TRAY_BYTES and any(
                one.tray_bytes > TRAY_BYTES for one in self._idle
            )
            if is_spare:
                self._lines -= 1
            elif not self._is_closed:
                self._idle.append(line)
                return
        line.close()

    def _take(self, timeout_s: float, is_slow: bool) -> Line | None:
        """A line; None if there may be a new one."""
        if not self._origin.is_here:
            raise NoAnswer(f"the connections to owner {self._name} are another process's")
        with self._lock:
            if self._is_closed:
                raise NoAnswer(f"the connections to owner {self._name} were ended")
            # Nobody waits then who may go.
            if self._may_go(is_slow) and (self._idle or self._lines < LINES_MAX):
                self._slow += is_slow
                if self._idle:
                    return self._idle.pop()
                self._lines += 1
                return None
            turn = _Turn(is_slow)
            self._turns.append(turn)
        try:
            turn.came.wait(timeout_s)
        except BaseException:
            if not self._ends(turn):
                self._give_back(turn.line, is_slow)
            raise
        if self._ends(turn):
            raise NoAnswer(f"owner {self._name} was not asked: others ask it all the time")
        if turn.line is None and self._is_closed:
            raise NoAnswer(f"the connections to owner {self._name} were ended")
        return turn.line

    def _ends(self, turn: _Turn) -> bool:
        """Whether a turn had not come; it does not come any more."""
        with self._lock:
            is_waiting = turn in self._turns
            if is_waiting:
                self._turns.remove(turn)
            return is_waiting


def _known(_: int) -> None:
    """Of a table that the first line has brought."""


def _window(hello: Hello, fds: list[int]) -> Window | None:
    """None if the owner's memory cannot be shared, such as that in a file on a disk."""
    if not fds:
        return None
    mapped = Mapped(fds[0])
    slots = hello.slots_address - hello.headers_address
    if not 0 < slots < mapped.nbytes:
        raise ValueError(f"its slots begin at {slots} of {mapped.nbytes} bytes")
    return Window(mapped.address, mapped.address + slots, mapped.nbytes - slots, mapped)
