# SPDX-License-Identifier: Apache-2.0
"""A rail on the same host by hand: te/plane/channel.pxi, written down a second time."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import struct
import time
from typing import Self

from te.handshake import decode_card

HEAD_BYTES, RING_BYTES = 4096, 128 << 10
RINGS_BYTES = HEAD_BYTES + 2 * RING_BYTES
# Offsets in the head of a ring: what was written, what was read, and who sleeps.
HEAD, TAIL, READER_ASLEEP, WRITER_ASLEEP = 0, 64, 128, 192
OUT, IN = 0, 256
TIMEOUT_S = 10.0


def make_rings(nbytes: int = RINGS_BYTES, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    fd = os.memfd_create("rings", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


class RingSocket:
    """The dialling side; what tests use of a socket. Its stream is the rings."""

    def __init__(self, card: bytes) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(TIMEOUT_S)
        self._sock.connect(f"\0te-{decode_card(card).id}")
        fd = make_rings()
        self.rings = mmap.mmap(fd, RINGS_BYTES)
        self._fd: int | None = fd
        self._blocking = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def greet(self, data: bytes) -> socket.socket:
        """Sends the hello with the rings; the socket, for the welcome."""
        assert self._fd is not None
        socket.send_fds(self._sock, [data], [self._fd])
        os.close(self._fd)
        self._fd = None
        return self._sock

    def setblocking(self, blocking: bool) -> None:
        self._blocking = blocking

    def setsockopt(self, *_: object) -> None:
        """There is nothing to set."""

    def get(self, at: int) -> int:
        return int(struct.unpack_from("@Q", self.rings, at)[0])

    def put(self, at: int, value: int) -> None:
        # In native mode a number is written at once; with "<" byte by byte, and the engine, which
        # looks all the time, finds positions that never were.
        struct.pack_into("@Q", self.rings, at, value % (1 << 64))

    def sendall(self, data: bytes) -> None:
        while data:
            head = self.get(OUT + HEAD)
            at = head % RING_BYTES
            room = min(RING_BYTES - (head - self.get(OUT + TAIL)), RING_BYTES - at)
            part = data[:room]
            self.rings[HEAD_BYTES + at : HEAD_BYTES + at + len(part)] = part
            self.put(OUT + HEAD, head + len(part))
            data = data[len(part) :]
            self._ring(OUT + READER_ASLEEP)
            if data:
                self._wait(OUT + WRITER_ASLEEP, lambda: self.get(OUT + HEAD) - self.get(OUT + TAIL)
                           < RING_BYTES)  # fmt: skip

    def recv(self, most: int) -> bytes:
        tail = self.get(IN + TAIL)
        if self.get(IN + HEAD) == tail and not self._wait(
            IN + READER_ASLEEP, lambda: self.get(IN + HEAD) != tail
        ):
            return b""
        at = tail % RING_BYTES
        nbytes = min(most, self.get(IN + HEAD) - tail, RING_BYTES - at)
        data = self.rings[HEAD_BYTES + RING_BYTES + at : HEAD_BYTES + RING_BYTES + at + nbytes]
        self.put(IN + TAIL, tail + nbytes)
        self._ring(IN + WRITER_ASLEEP)
        return data

    def bell(self) -> None:
        self._sock.send(b"\0")

    def sleep(self) -> None:
        """Asks for a bell, as a reader that goes to sleep."""
        struct.pack_into("@I", self.rings, IN + READER_ASLEEP, 1)

    def await_bell(self) -> None:
        """``TimeoutError`` if none comes."""
        self._sock.settimeout(TIMEOUT_S)
        assert self._sock.recv(64) == b"\0"

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
            if select.select([self._sock], [], [], 0.05 if self._blocking else 0)[0]:
                if not self._sock.recv(64):
                    if ready():
                        return True
                    if asleep == IN + READER_ASLEEP:
                        return False
                    raise ConnectionResetError
            elif not self._blocking:
                raise BlockingIOError
        raise TimeoutError
