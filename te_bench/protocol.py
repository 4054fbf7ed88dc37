# SPDX-License-Identifier: Apache-2.0
"""What the runner and its workers say to each other: one JSON object a line over a socket pair."""

from __future__ import annotations

import socket
import time
from typing import Any, Literal, TypeVar

import msgspec

__all__ = ["Channel", "ChannelClosed", "Info", "Op", "Reply", "Request", "Setup", "Timing"]

Info = dict[str, Any]
"""What one side of a contender tells the other: JSON, made and read by the contender alone."""

Op = Literal["open", "connect", "accept", "fill", "begin", "transfer", "receive", "end", "check"]

LINE_BYTES_MAX = 64 << 20

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Which contender a worker runs, on which side, with what."""

    contender: str
    role: Literal["source", "destination"]
    blocks: int
    nbytes: int
    threads: int
    sync: bool
    transport: str
    memory: str
    seed: int
    #: Beside a busy interpreter.
    busy: bool
    #: Longest time any single step may take.
    deadline_s: float


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One step; ``setup`` comes with ``open`` alone."""

    op: Op
    setup: Setup | None = None
    info: Info = {}
    seed: int = 0
    busy: bool = False


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One round as the source saw it."""

    elapsed_ns: int
    #: Of each call until its bytes had landed.
    ops_ns: list[int]
    #: Of each call until it returned to its caller; empty where calls block anyway.
    submit_ns: list[int] = []
    #: Of each call from the outcome, as polling shows it, until the thread that waited for it went
    #: on; empty where the two cannot be told apart.
    late_ns: list[int] = []


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one step: a value, or why there is none."""

    ok: Any = None
    absent: str | None = None
    failed: str | None = None


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """Lines in both directions; used by one thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: msgspec.Struct) -> None:
        """Raises ``ChannelClosed`` when the other side is gone."""
        self._sock.settimeout(None)
        try:
            self._sock.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, kind: type[T], timeout_s: float | None) -> T:
        """The next message; ``TimeoutError`` if none came in time, ``ChannelClosed`` at the end."""
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > LINE_BYTES_MAX:
                raise ChannelClosed(f"a message of more than {LINE_BYTES_MAX} bytes")
            self._sock.settimeout(None if give_up_s is None else self._left_s(give_up_s))
            try:
                data = self._sock.recv(1 << 16)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("the other side closed the connection")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    @staticmethod
    def _left_s(give_up_s: float) -> float:
        left_s = give_up_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s
