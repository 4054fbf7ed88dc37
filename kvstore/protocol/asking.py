# SPDX-License-Identifier: Apache-2.0
"""Questions to an owner, asked and answered in the thread that wants to know."""

from __future__ import annotations

import itertools
import threading
import time

import msgspec
import zmq

from kvstore.protocol.messages import (
    REQUEST_ID,
    Answer,
    Question,
    Refused,
    decode_answer,
    encode,
    split,
)
from kvstore.protocol.sockets import Sockets, Where

__all__ = ["Asker", "NoAnswer"]


class NoAnswer(Exception):
    """The owner did not answer in time, or refused; the text says which."""


class Asker:
    """Asks one owner; from any thread. Each thread that asks has a connection of its own for as
    long as it waits: handing questions to another thread would cost two changes of threads, which
    is as long as the question itself."""

    def __init__(self, sockets: Sockets, where: Where, name: str) -> None:
        self._sockets = sockets
        self._where = where
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[zmq.Socket[bytes]] = []
        self._ids = itertools.count()
        self._closed = False

    def ask(self, question: Question, timeout_s: float) -> Answer:
        """The answer; ``NoAnswer``."""
        deadline_s = time.monotonic() + timeout_s
        socket = self._take()
        try:
            answer = self._asked(socket, question, deadline_s)
        except zmq.ZMQError as exc:
            socket.close()
            raise NoAnswer(f"owner {self._name} cannot be asked: {exc}") from exc
        except NoAnswer:
            socket.close()  # Whatever it still answers is not waited for.
            raise
        self._give_back(socket)
        if isinstance(answer, Refused):
            raise NoAnswer(f"owner {self._name}: {answer.why}")
        return answer

    def close(self) -> None:
        """Ends the connections that nobody uses at the moment; the others end with their use."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for socket in idle:
            socket.close()

    def _take(self) -> zmq.Socket[bytes]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        try:
            return self._sockets.connect(self._where)
        except zmq.ZMQError as exc:  # The context is closed, or there are too many sockets.
            raise NoAnswer(f"owner {self._name} cannot be asked: {exc}") from exc

    def _give_back(self, socket: zmq.Socket[bytes]) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(socket)
                return
        socket.close()

    def _asked(self, socket: zmq.Socket[bytes], question: Question, deadline_s: float) -> Answer:
        request_id = REQUEST_ID.pack(next(self._ids))
        if time.monotonic() >= deadline_s:
            raise NoAnswer(f"owner {self._name} was not asked: no time was left for it")
        socket.send(request_id + encode(question), zmq.NOBLOCK)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not socket.poll(int(left_s * 1000) + 1):
                raise NoAnswer(f"owner {self._name} does not answer in time")
            try:
                answered, raw = split(socket.recv(zmq.NOBLOCK))
                if answered == request_id:
                    return decode_answer(raw)
            except msgspec.DecodeError as exc:
                raise NoAnswer(f"owner {self._name} answers what cannot be read: {exc}") from exc
