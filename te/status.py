# SPDX-License-Identifier: Apache-2.0
"""Programs of the same user ask live processes how they are, over a Unix socket of each.

A process listens on ``DIRECTORY/PID-NAME.sock`` (``StatusSocket``). Only its own user may enter the
directory, and the socket answers only that user and root. ``running`` lists the sockets of live
processes, ``ask`` puts a question to one. Each connection carries one question and one answer: a
length of four bytes in network order, then MessagePack.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from te import nesting
from te.errors import StatusSocketError
from te.forking import let_go_in_child

__all__ = [
    "ANSWER_BYTES_MAX",
    "Answer",
    "Live",
    "StatusSocket",
    "ask",
    "default_directories",
    "default_directory",
    "process_name",
    "running",
]

logger = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[Mapping[str, Any]], Any]
"""Gets the arguments of a question; returns what msgspec can encode, or raises
``StatusSocketError`` when the question cannot be answered. It runs on the socket's own thread."""

QUESTION_BYTES_MAX: Final = 64 << 10
ANSWER_BYTES_MAX: Final = 16 << 20
#: For the question to arrive, and again for the answer to be taken.
CONNECTION_TIMEOUT_S: Final = 2.0
#: Connections that may wait while another is answered.
BACKLOG: Final = 8
ACCEPT_PAUSE_S: Final = 1.0
#: A socket file that nobody listens on is removed once it is so old: a younger one may belong to a
#: process that is between bind(2) and listen(2).
STALE_AGE_S: Final = 10.0

PROCESS_NAME_MAX: Final = 200

_FILE: Final = re.compile(r"(\d{1,10})-([A-Za-z0-9._-]{1,64})\.sock")
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


class _Question(msgspec.Struct):
    question: str
    arguments: dict[str, Any]


class _Reply(msgspec.Struct, omit_defaults=True):
    answer: Any = None
    #: A sentence instead of an answer; empty if there is one.
    error: str = ""


@dataclass(frozen=True, order=True)
class Live:
    """The socket of a live process."""

    path: Path
    pid: int
    name: str


def process_name() -> str:
    """The command line of this process, or as much of it as fits into a line."""
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    return " ".join(words).strip()[:PROCESS_NAME_MAX]


# -- where the sockets are


def default_directories() -> tuple[Path, ...]:
    """Where processes of this user may have their sockets unless they were told otherwise; those
    that start now use the first."""
    shared = Path(f"/tmp/te-{os.geteuid()}")  # Checked before it is used.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # The directory is not there, as in a container.
        if Path(runtime).is_absolute() and Path(runtime).stat().st_uid == os.geteuid():
            return Path(runtime) / "te", shared
    return (shared,)


def default_directory() -> Path:
    """``$XDG_RUNTIME_DIR/te`` if that is a directory of this user, else ``/tmp/te-UID``."""
    return default_directories()[0]


@contextlib.contextmanager
def _opened(directory: Path, *, to_listen: bool = False) -> Iterator[str]:
    """A name for the directory that is short enough for the address of a socket, and leads to the
    very directory that was checked; ``StatusSocketError``, ``FileNotFoundError``. Root may look
    into directories of others, but does not listen there."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise StatusSocketError(
            f"cannot open the status directory {directory}: {exc.strerror}"
        ) from exc
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() and (to_listen or os.geteuid() != 0):
            raise StatusSocketError(
                f"the status directory {directory} belongs to user {found.st_uid}, not to user"
                f" {os.geteuid()}, who runs this process: remove it, or name another directory"
            )
        if found.st_mode & 0o077:
            raise StatusSocketError(
                f"the status directory {directory} has mode {stat.S_IMODE(found.st_mode):04o}, so"
                f" other users may enter it: run 'chmod 700 {directory}'"
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def running(directory: Path | None = None) -> list[Live]:
    """The sockets of live processes, by file name; removes those that dead processes have left.

    Without ``directory``: of all ``default_directories()``. One that does not exist has none.
    Raises ``StatusSocketError`` for a directory that belongs to another user, or is open to others.
    """
    if directory is None:
        return [one for each in default_directories() for one in running(each)]
    try:
        with _opened(directory) as place:
            return [
                Live(directory / path.name, int(match[1]), match[2])
                for path in sorted(Path(place).iterdir())
                if (match := _FILE.fullmatch(path.name)) and _listens(path)
            ]
    except FileNotFoundError:
        return []


def _listens(path: Path) -> bool:
    """Whether somebody listens there; removes the file if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            return True  # Too many wait already, as for a process that was stopped.
        except OSError as exc:
            if exc.errno == errno.ECONNREFUSED:
                with contextlib.suppress(FileNotFoundError):  # Somebody else was faster.
                    if time.time() - path.lstat().st_mtime >= STALE_AGE_S:
                        path.unlink()
            return False
    return True


# -- the side that asks


def ask(
    path: Path, question: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = 2.0
) -> Any:
    """The answer of the process that listens on ``path``, as MessagePack decodes it: dicts, lists,
    strings, numbers.

    Raises ``StatusSocketError`` when nobody listens there, the answer does not come within
    ``timeout_s``, or the process says why it cannot answer.
    """
    deadline_s = time.monotonic() + timeout_s
    request = msgspec.msgpack.encode(_Question(question, dict(arguments or {})))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            with _opened(path.parent) as place:
                _connect(sock, f"{place}/{path.name}", timeout_s)  # The directory says whose it is.
            _send(sock, request, deadline_s)
            reply = _receive(sock, ANSWER_BYTES_MAX, deadline_s)
        except TimeoutError:
            raise StatusSocketError(
                f"{path} did not answer {question!r} within {timeout_s} s"
            ) from None
        except OSError as exc:
            raise StatusSocketError(f"{path} cannot be asked: {exc.strerror}") from exc
    if reply is None:
        raise StatusSocketError(f"{path} closed the connection before it answered {question!r}")
    decoded = _decode(reply, _Reply)
    if decoded.error:
        raise StatusSocketError(decoded.error)
    return decoded.answer


def _connect(sock: socket.socket, path: str, timeout_s: float) -> None:
    """Waits for a place among those that the other side has yet to accept, which a socket with a
    time-out of Python's would not; ``TimeoutError``."""
    seconds, rest_s = divmod(timeout_s, 1)
    limit = struct.pack("ll", int(seconds), int(rest_s * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    try:
        sock.connect(path)
    except BlockingIOError:
        raise TimeoutError from None


# -- the side that answers


class StatusSocket:
    """Answers questions, one connection after another, on a daemon thread that sleeps meanwhile.

    It is no part of an engine's accepting thread, as an answer may take a while and other engines
    wait there for their greetings. Whoever asks may be slow: each side of a connection has
    ``CONNECTION_TIMEOUT_S``.
    """

    def __init__(self, directory: Path, name: str, answers: Mapping[str, Answer]) -> None:
        """Makes the directory if it does not exist, with mode 0700, and removes what dead processes
        have left there. ``answers``: by question; it is looked up at each question, so that more
        may be put into it later. Raises ``StatusSocketError`` when it cannot listen.
        """
        self.path = directory / f"{os.getpid()}-{name}.sock"
        if _FILE.fullmatch(self.path.name) is None:
            raise StatusSocketError(f"{name!r} cannot be the name of a status socket")
        self._answers = answers
        self._ending = threading.Event()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(directory, to_listen=True) as place:
                running(directory)  # Removes what nobody listens on.
                self._sock.bind(f"{place}/{self.path.name}")
            self._inode = self.path.lstat().st_ino
            self._sock.listen(BACKLOG)
        except OSError as exc:
            self._sock.close()
            raise StatusSocketError(f"cannot listen on {self.path}: {exc.strerror}") from exc
        except StatusSocketError:
            self._sock.close()
            raise
        self._thread = threading.Thread(target=self._serve, name=f"te-status-{name}", daemon=True)
        let_go_in_child(self)
        self._thread.start()

    def close(self, timeout_s: float = CONNECTION_TIMEOUT_S) -> bool:
        """Removes the file and ends the thread; False when an answer under way did not end in time.
        Idempotent."""
        if self._sock.fileno() < 0:  # Closed already, or this is a child of fork(2).
            return not self._thread.is_alive()
        self._ending.set()
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self._inode:  # Else the file is another process's.
                self.path.unlink()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # Wakes accept(2).
        if threading.current_thread() is not self._thread:  # An answer closes the engine.
            self._thread.join(timeout_s)
        self._sock.close()
        return not self._thread.is_alive()

    def let_go(self) -> None:
        """In a child of fork(2): forgets the socket, which is the parent's."""
        self._sock.close()

    def _serve(self) -> None:
        while not self._ending.is_set():
            try:
                sock, _ = self._sock.accept()
            except OSError as exc:
                if not self._ending.is_set():
                    logger.warning("%s cannot accept connections: %s", self.path, exc.strerror)
                self._ending.wait(ACCEPT_PAUSE_S)
                continue
            with sock:
                try:
                    self._converse(sock)
                except (OSError, StatusSocketError) as exc:
                    logger.info("%s: a connection ended without an answer: %s", self.path, exc)
                except Exception:
                    logger.exception("%s goes on after a bug", self.path)

    def _converse(self, sock: socket.socket) -> None:
        _check_user(sock)
        request = _receive(sock, QUESTION_BYTES_MAX, time.monotonic() + CONNECTION_TIMEOUT_S)
        if request is None:
            return  # The other side only looked whether this process lives.
        reply = msgspec.msgpack.encode(self._reply(_decode(request, _Question)))
        _send(sock, reply, time.monotonic() + CONNECTION_TIMEOUT_S)

    def _reply(self, asked: _Question) -> _Reply:
        answer = self._answers.get(asked.question)
        if answer is None:
            known = ", ".join(sorted(self._answers)) or "none"
            return _Reply(error=f"{self.path}: no question {asked.question!r}; known are: {known}")
        try:
            encoded = msgspec.msgpack.encode(answer(asked.arguments))
        except StatusSocketError as exc:
            return _Reply(error=str(exc))
        except Exception as exc:
            logger.exception("%s: the answer to %r failed", self.path, asked.question)
            return _Reply(error=f"{self.path}: the answer to {asked.question!r} failed: {exc!r}")
        room = ANSWER_BYTES_MAX - 1024  # The reply around it takes a few bytes.
        if len(encoded) > room:
            return _Reply(
                error=f"{self.path}: the answer to {asked.question!r} has {len(encoded)} bytes, and"
                f" may have {room}: ask for less"
            )
        return _Reply(answer=msgspec.Raw(encoded))


def _check_user(sock: socket.socket) -> None:
    """``StatusSocketError`` unless the other side is a process of this user or root."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid = _CREDENTIALS.unpack(packed)[1]
    if uid not in (os.geteuid(), 0):
        raise StatusSocketError(f"user {uid} asks; only user {os.geteuid()} and root may")


# -- what both sides do


def _decode(data: bytes, kind: type[Any]) -> Any:
    """``StatusSocketError`` for what is no message of that kind."""
    complaint = nesting.complaint(data) if kind is _Question else None
    if complaint:
        raise StatusSocketError(f"the question has {complaint}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise StatusSocketError(f"this is no message of te's status: {exc}") from exc


def _send(sock: socket.socket, message: bytes, deadline_s: float) -> None:
    sock.settimeout(_left_s(deadline_s))
    sock.sendall(_LENGTH.pack(len(message)) + message)  # Its time-out is for all of it.


def _receive(sock: socket.socket, nbytes_max: int, deadline_s: float) -> bytes | None:
    """The message; None if the other side has closed the connection before it began."""
    head = _exactly(sock, _LENGTH.size, deadline_s)
    if not head:
        return None
    (nbytes,) = _LENGTH.unpack(head)
    if nbytes > nbytes_max:
        raise StatusSocketError(f"a message of {nbytes} bytes; {nbytes_max} are allowed")
    return _exactly(sock, nbytes, deadline_s, may_end=False)


def _exactly(sock: socket.socket, nbytes: int, deadline_s: float, *, may_end: bool = True) -> bytes:
    """So many bytes; none if the connection ends before the first and ``may_end``."""
    parts: list[bytes] = []
    missing = nbytes
    while missing:
        sock.settimeout(_left_s(deadline_s))
        part = sock.recv(min(missing, 1 << 16))
        if not part:
            if may_end and not parts:
                return b""
            raise ConnectionResetError(errno.ECONNRESET, "the message is not whole")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the deadline is over")
    return left_s
