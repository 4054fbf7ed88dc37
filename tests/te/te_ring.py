# SPDX-License-Identifier: Apache-2.0
"""A rail on the same host by hand: te/transports/samehost/rings.pxd, written down a second time."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import time
from typing import Self

from te_far import is_readable

from te.handshake import decode_card

HEAD_BYTES, RING_BYTES = 4096, 128 << 10
RINGS_BYTES = HEAD_BYTES + 2 * RING_BYTES
# Offsets in the head of a ring: what was written, what was read, and who sleeps.
HEAD, TAIL, READER_ASLEEP, WRITER_ASLEEP = 0, 64, 128, 192
OUT, IN = 0, 256
TIMEOUT_S = 60.0


def make_rings(nbytes: int = RINGS_BYTES, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("rings", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class RingEnd:
    """One side of a rail; what tests use of a socket. Its stream is the rings, of which ``out`` and
    ``into`` are the heads of its own and the other's."""

    def __init__(self, sock: socket.socket, fd: int, out: int, into: int) -> None:
        self.sock = sock
        self.sock.settimeout(TIMEOUT_S)
        self.rings = mmap.mmap(fd, RINGS_BYTES)
        self._positions = memoryview(self.rings)[:HEAD_BYTES].cast("Q")
        self._out, self._in = out, into
        self._blocking = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()
        self._positions.release()
        self.rings.close()

    def setblocking(self, blocking: bool) -> None:
        self._blocking = blocking

    def setsockopt(self, *_: object) -> None:
        """There is nothing to set."""

    def get(self, at: int) -> int:
        return self._positions[at // 8]

    def put(self, at: int, value: int) -> None:
        # By one store: struct.pack_into clears the bytes first, and the engine, which looks all the
        # time, finds positions that never were.
        self._positions[at // 8] = value % (1 << 64)

    def sendall(self, data: bytes) -> None:
        while data:
            head = self.get(self._out + HEAD)
            at = head % RING_BYTES
            room = min(RING_BYTES - (head - self.get(self._out + TAIL)), RING_BYTES - at)
            part = data[:room]
            at += _base(self._out)
            self.rings[at : at + len(part)] = part
            self.put(self._out + HEAD, head + len(part))
            data = data[len(part) :]
            self._ring(self._out + READER_ASLEEP)
            if data:
                self._wait(self._out + WRITER_ASLEEP, self._has_room)

    def recv(self, most: int) -> bytes:
        tail = self.get(self._in + TAIL)
        if self.get(self._in + HEAD) == tail and not self._wait(
            self._in + READER_ASLEEP, lambda: self.get(self._in + HEAD) != tail
        ):
            return b""
        at = tail % RING_BYTES
        nbytes = min(most, self.get(self._in + HEAD) - tail, RING_BYTES - at)
        at += _base(self._in)
        data = self.rings[at : at + nbytes]
        self.put(self._in + TAIL, tail + nbytes)
        self._ring(self._in + WRITER_ASLEEP)
        return data

    def _has_room(self) -> bool:
        return self.get(self._out + HEAD) - self.get(self._out + TAIL) < RING_BYTES

    def bell(self) -> None:
        self.sock.send(b"\0")

    def sleep(self) -> None:
        """Asks for a bell, as a reader that goes to sleep."""
        struct.pack_into("@I", self.rings, self._in + READER_ASLEEP, 1)

    def await_bell(self) -> None:
        """``TimeoutError`` if none comes."""
        self.sock.settimeout(TIMEOUT_S)
        assert self.sock.recv(64) == b"\0"

    def _ring(self, asleep: int) -> None:
        if struct.unpack_from("@I", self.rings, asleep)[0]:
            struct.pack_into("@I", self.rings, asleep, 0)
            self.bell()

    def _wait(self, asleep: int, ready: object) -> bool:
        """False at the end of the stream."""
        assert callable(ready)
        give_up_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < give_up_s:
            struct.pack_into("@I", self.rings, asleep, 1)
            if ready():
                return True
            if is_readable(self.sock, 0.05 if self._blocking else 0.0):
                if not self.sock.recv(64):
                    if ready():
                        return True
                    if asleep == self._in + READER_ASLEEP:
                        return False
                    raise ConnectionResetError
            elif not self._blocking:
                raise BlockingIOError
        raise TimeoutError


def _base(ring: int) -> int:
    """Where the bytes of a ring begin."""
    return HEAD_BYTES if ring == OUT else HEAD_BYTES + RING_BYTES


class RingSocket(RingEnd):
    """The dialling side."""

    def __init__(self, card: bytes) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"\0te-{decode_card(card).id}")
        self._fd = make_rings()
        super().__init__(sock, self._fd, OUT, IN)

    def greet(self, data: bytes) -> socket.socket:
        """Sends the hello with the rings, once; the socket, for the welcome."""
        socket.send_fds(self.sock, [data], [self._fd])
        os.close(self._fd)
        return self.sock


def accept_rings(sock: socket.socket) -> tuple[RingEnd, bytes]:
    """The side that was dialled, once the hello has come with the rings; and that hello."""
    data, (fd,), _, _ = socket.recv_fds(sock, 1 << 16, 1)
    try:
        return RingEnd(sock, fd, IN, OUT), data
    finally:
        os.close(fd)
