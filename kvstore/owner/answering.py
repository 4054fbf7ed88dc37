# SPDX-License-Identifier: Apache-2.0
"""Answers processes of the same host over a Unix socket: see ``kvstore.protocol.calling``."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from kvstore.objects.changes import KEY_BYTES
from kvstore.owner.fetching import Fetching
from kvstore.owner.owner import Owner
from kvstore.protocol.mapped import Mapped
from kvstore.protocol.messages import (
    CALL_BYTES_MAX,
    TRAY_BYTES,
    Answer,
    Fetch,
    Greet,
    Hello,
    Keep,
    Question,
    Refused,
    Take,
    decode_question,
    encode,
)
from kvstore.protocol.reach import NONCE_NBYTES, Reached, reached
from kvstore.protocol.users import check_user
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["Answerer"]

logger = logging.getLogger(__name__)

LINES_MAX: Final = 1024
"""Connections of all clients, of which each has up to four."""
REFUSED_MAX: Final = 64
"""So many more are told that there are too many; those of more are closed."""
GREETING_TIMEOUT_S: Final = 5.0
_SEND_TIMEOUT: Final = struct.pack("ll", 5, 0)  # struct timeval: 5 s
"""A client that does not read its answer for so long is left alone."""
CLOSE_TIMEOUT_S: Final = 10.0


class Answerer:
    """A thread for each connection of a client: none waits for another's fence, and the question
    is answered in the thread that it wakes."""

    def __init__(
        self,
        owner: Owner,
        path: Path,
        answer: Callable[[Question], Answer | None],
        table_fd: int,
        take: Callable[[Take, int], Answer],
    ) -> None:
        """Listens; ``OSError`` if it cannot.

        Args:
            owner: whose memory clients read.
            path: of the socket.
            answer: to all questions but ``Take``. Is called in many threads. None: to a question
                that is not answered.
            table_fd: the descriptor of the table, which clients get before that of the memory.
            take: to ``Take``, with the address of the tray.
        """
        self._owner = owner
        self._answer = answer
        self._take = take
        self._table_fd = table_fd
        self._path = path
        self._lock = threading.Lock()
        self._lines: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._is_left = False  # Closed, with answers under way.
        self._strange = RateLimitedLog(logger)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(str(path))
            self._listener.listen(LINES_MAX)
        except OSError:
            self._listener.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="kvstore-answerer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answers nobody any more. Waits for answers under way, but not for a client's memory that
        cannot be read to its end."""
        with self._lock:
            self._closing = True
            lines = dict(self._lines)
        self._path.unlink(missing_ok=True)
        for one in (self._listener, *lines):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in (self._thread, *lines.values()):
            thread.join(max(until_s - time.monotonic(), 0.0))
        open_ = sum(thread.is_alive() for thread in lines.values())
        if open_:
            self._is_left = True
            self._owner.keep_file()
            logger.warning(
                "%d connections of this host still have an answer under way; they are left", open_
            )
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError as exc:
                if self._closing:
                    return
                if exc.errno == errno.EINVAL:
                    logger.warning("another process has ended %s: nobody is let in", self._path)
                    return
                self._strange.warn("a process of this host cannot be let in: %s", exc)
                threading.Event().wait(0.1)  # Such as for a descriptor.
                continue
            with self._lock:
                if self._closing or len(self._lines) >= LINES_MAX + REFUSED_MAX:
                    line.close()
                    continue
                thread = threading.Thread(
                    target=self._run, args=[line], name="kvstore-line", daemon=True
                )
                self._lines[line] = thread
                try:
                    thread.start()
                except RuntimeError as exc:  # No more threads.
                    self._strange.warn("a process of this host cannot be let in: %s", exc)
                    del self._lines[line]
                    line.close()

    def _run(self, line: socket.socket) -> None:
        try:
            self._serve(line)
        except (OSError, ValueError) as exc:
            if not self._closing:
                self._strange.warn("a connection of a process of this host is ended: %s", exc)
        except Exception as exc:
            if self._is_left:  # The owner's threads have ended, for example.
                logger.info("an answer has come to nothing behind the owner's end: %s", exc)
            else:
                logger.exception("a bug in the store: a connection is ended")
        finally:
            with self._lock:
                del self._lines[line]
            line.close()

    def _serve(self, line: socket.socket) -> None:
        check_user(line)
        greeted = self._greet(line)
        if greeted is None:
            return
        hello, tray, client = greeted
        memory = self._owner.shared
        with contextlib.closing(Fetching(self._owner, tray, client)) as fetching:
            shared = [self._table_fd, *([] if memory is None else [memory])]
            socket.send_fds(line, [encode(hello)], shared)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
            self._answer_all(line, tray, fetching)

    def _answer_all(self, line: socket.socket, tray: Mapped, fetching: Fetching) -> None:
        room = bytearray(CALL_BYTES_MAX)
        line.settimeout(None)  # Its client may have no question for hours.
        while count := line.recv_into(room):
            question, reply = self._read(memoryview(room)[:count], tray, fetching)
            has_stored = isinstance(question, Take | Keep)
            if has_stored:
                self._owner.tell_here()  # First: it finds what a client was told is stored.
            if reply is not None:
                line.send(encode(reply))
            if has_stored:
                # Who tells others takes the interpreter's lock, here and at the client.
                self._owner.tell_others()
            if isinstance(question, Fetch | Keep):
                line.settimeout(self._owner.claim_timeout_s if fetching.is_open else None)

    def _greet(self, line: socket.socket) -> tuple[Hello, Mapped, Reached | None] | None:
        """The answer, the client's tray, and the client, if its memory can be read; None for one
        that is refused or has gone."""
        line.settimeout(GREETING_TIMEOUT_S)
        raw, fds, _, _ = socket.recv_fds(line, CALL_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            if not raw:
                return None
            greet = decode_question(raw)
            with self._lock:
                is_full = len(self._lines) > LINES_MAX
            reply = _too_many() if is_full else self._answer(greet)
            if not isinstance(reply, Hello) or not isinstance(greet, Greet) or not fds:
                line.send(encode(reply if isinstance(reply, Refused) else Refused("greet first")))
                return None
            tray = Mapped(fds[0])
            if tray.nbytes < TRAY_BYTES + NONCE_NBYTES:
                raise ValueError(
                    f"a tray of {tray.nbytes} bytes, and {TRAY_BYTES + NONCE_NBYTES} are needed"
                )
            client: Reached | str | None = None
            if reply.lends:
                client = reached(line, fds[0], tray, greet.tray_address)
        finally:
            for one in fds:
                os.close(one)
        if isinstance(client, str):
            logger.info("objects of a process of this host come through its tray: %s", client)
            client = None
        return msgspec.structs.replace(reply, reads=client is not None), tray, client

    def _read(
        self, raw: memoryview, tray: Mapped, fetching: Fetching
    ) -> tuple[Question | None, Answer | None]:
        """A question, if it is one, and what is answered."""
        try:
            question = decode_question(raw)
        except msgspec.DecodeError as exc:
            return None, Refused(f"the question cannot be read: {exc}")
        if isinstance(question, Fetch):
            return question, fetching.fetch(question)
        if isinstance(question, Keep):
            return question, fetching.keep()
        if not isinstance(question, Take):
            return question, self._answer(question)
        count = len(question.keys) // KEY_BYTES
        room = tray.nbytes - NONCE_NBYTES
        if count * question.nbytes > room:
            return None, Refused(
                f"{count} objects of {question.nbytes} bytes do not fit a tray of {room}"
            )
        try:
            return question, self._take(question, tray.address)
        except ValueError as exc:
            return None, Refused(str(exc))


def _too_many() -> Refused:
    return Refused(f"it cannot be called by more: {LINES_MAX} connections of this host are open")
