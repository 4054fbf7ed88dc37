# SPDX-License-Identifier: Apache-2.0
"""Somebody on the network between two engines, who sees and changes what goes by."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from te.connect.greeting import GREETING
from te.handshake import decode_card, encode

__all__ = ["GREETINGS", "Change", "Middle", "middle"]

TIMEOUT_S: Final = 60.0
GREETINGS: Final = 2
"""Of each side, before the records."""

Change: TypeAlias = Callable[[Iterator[bytes]], Iterator[bytes]]
"""Of what one side sends, greeting by greeting, then record by record: what arrives instead."""


class Middle:
    """One connection at a time goes through it, in records of te's (tcp/encryption.pxd), or in
    those of TLS (RFC 8446, 5.2)."""

    def __init__(self, card: bytes, is_tls: bool = False) -> None:
        self._is_tls = is_tls
        there = decode_card(card)
        self._there = (there.host, there.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        #: The card of the engine behind it.
        self.card = encode(msgspec.structs.replace(there, port=self._listener.getsockname()[1]))
        #: All that the source and the destination have sent.
        self.seen: tuple[list[bytes], list[bytes]] = ([], [])
        self.changes: list[Change] = [lambda items: items, lambda items: items]
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._listener.accept()[0] as here:
            self._listener.close()  # There is one connection.
            with socket.create_connection(self._there, TIMEOUT_S) as there:
                here.settimeout(TIMEOUT_S)
                back = threading.Thread(target=self._pump, args=(1, there, here), daemon=True)
                back.start()
                self._pump(0, here, there)
                back.join(TIMEOUT_S)

    def _pump(self, side: int, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for item in self.changes[side](self._items(side, source)):
                target.sendall(item)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _items(self, side: int, source: socket.socket) -> Iterator[bytes]:
        for number in range(1 << 60):
            if number < GREETINGS:
                head = _exactly(source, GREETING.size)
                body_nbytes = GREETING.unpack(head)[3]
            elif self._is_tls:
                head = _exactly(source, 5)
                body_nbytes = int.from_bytes(head[3:], "big")
            else:
                head = _exactly(source, 4)
                body_nbytes = struct.unpack("<I", head)[0] + 16
            item = head + _exactly(source, body_nbytes)
            self.seen[side].append(item)
            yield item

    def close(self) -> None:
        self._listener.close()
        self._threads[0].join(TIMEOUT_S)
        assert not self._threads[0].is_alive()


def _exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = sock.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


@contextlib.contextmanager
def middle(card: bytes, is_tls: bool = False) -> Iterator[Middle]:
    found = Middle(card, is_tls)
    try:
        yield found
    finally:
        found.close()
