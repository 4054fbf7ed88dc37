# SPDX-License-Identifier: Apache-2.0
"""Both sides of the wire by hand, to say what a real engine never would."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from te.handshake import PROTOCOL_VERSION, Card, CardRegion, Hello, Welcome, decode_card, encode
from te.transports.tcp.wire import (
    DESTINATION_FRAMES,
    LANDING,
    Ack,
    Frame,
    FrameReader,
    Greeting,
    GreetingKind,
    GreetingReader,
    encode_greeting,
    encode_segment_header,
)

TIMEOUT_S = 10.0
RAW_ID = "ab" * 16


def dial(card: bytes) -> socket.socket:
    decoded = decode_card(card)
    return socket.create_connection((decoded.host, decoded.port), TIMEOUT_S)


def read_item(sock: socket.socket, reader: Any) -> Any:
    """The next item; None at the end of the stream."""
    while True:
        try:
            nbytes = sock.recv_into(reader.room())
        except ConnectionResetError:
            return None
        if not nbytes:
            return None
        item = reader.filled(nbytes)
        if item is not None:
            return item


def hello(card: bytes, version: int = PROTOCOL_VERSION, **changes: Any) -> bytes:
    decoded = decode_card(card)
    fields = {"id": RAW_ID, "epoch": 1, "peer_id": decoded.id, "peer_epoch": decoded.epoch}
    return encode_greeting(GreetingKind.HELLO, version, encode(Hello(**fields | changes)))


def segment(transfer: int, tag: int, landings: list[tuple[int, int]], nbytes: int) -> bytes:
    """Header and descriptors; the payload is for the caller."""
    head = encode_segment_header(transfer, tag, len(landings), nbytes)
    return head + np.array(landings, LANDING).tobytes()


class RawSource:
    """A welcomed connection to an engine."""

    def __init__(self, card: bytes) -> None:
        self.sock = dial(card)
        self.sock.sendall(hello(card))
        greeting: Greeting = read_item(self.sock, GreetingReader())
        assert greeting.kind == GreetingKind.WELCOME
        self._reader = FrameReader(DESTINATION_FRAMES)

    def send(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def ack(self) -> Ack:
        frame: Frame | None = read_item(self.sock, self._reader)
        assert isinstance(frame, Ack), f"no acknowledgement but {frame}"
        return frame

    def closed(self) -> bool:
        """Waits until the engine has closed the connection."""
        return read_item(self.sock, self._reader) is None


@contextlib.contextmanager
def raw_destination() -> Iterator[tuple[socket.socket, bytes]]:
    """A listening socket, and the card of an engine that would be behind it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        card = Card(
            protocol=PROTOCOL_VERSION,
            id=RAW_ID,
            epoch=1,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            transports=["tcp"],
            regions=[CardRegion(1, 1, "host")],
        )
        yield listener, encode(card)


def welcome(version: int = PROTOCOL_VERSION, **changes: Any) -> bytes:
    message = Welcome(**{"id": RAW_ID, "epoch": 1} | changes)
    return encode_greeting(GreetingKind.WELCOME, version, encode(message))
