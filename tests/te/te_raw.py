# SPDX-License-Identifier: Apache-2.0
"""Both sides of the wire by hand, to say what a real engine never would."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import secrets
import socket
from collections.abc import Iterator
from typing import Any, Self

from te_frames import HEADER, Ack, AckStatus, Kind
from te_ring import RingEnd, RingSocket, accept_rings

import te
from te.connect.greeting import Greeting, GreetingKind, GreetingReader, encode_greeting
from te.handshake import PROTOCOL_VERSION, Card, CardRegion, Hello, Welcome, decode_card, encode
from te.transports.rdma.messages import RailAnswer, RailOffer, RdmaHello, RdmaWelcome
from te.transports.samehost.messages import HostHello, HostWelcome, Nonce, Shared
from te.transports.samehost.reach import NonceMemory

TIMEOUT_S = 10.0
RAW_ID = "ab" * 16
#: What every same-host link begins with: bytes of this process.
NONCE = NonceMemory()
_numbers = itertools.count(1)


def dial(card: bytes) -> socket.socket:
    decoded = decode_card(card)
    return socket.create_connection((decoded.host, decoded.port), TIMEOUT_S)


def dial_unix(card: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(f"\0te-{decode_card(card).id}")  # With a timeout it would not wait for a place.
    sock.settimeout(TIMEOUT_S)
    return sock


def read_greeting(sock: socket.socket) -> Greeting | None:
    """None at the end of the stream."""
    reader = GreetingReader()
    while True:
        try:
            nbytes = sock.recv_into(reader.room())
        except ConnectionResetError:
            return None
        if not nbytes:
            return None
        greeting = reader.filled(nbytes)
        if greeting is not None:
            return greeting


def read_exactly(sock: socket.socket | RingEnd, nbytes: int) -> bytes | None:
    """None if the stream ends before."""
    data = b""
    while len(data) < nbytes:
        try:
            more = sock.recv(nbytes - len(data))
        except ConnectionResetError:
            return None
        if not more:
            return None
        data += more
    return data


def hello(
    card: bytes, transport: str = "tcp", version: int = PROTOCOL_VERSION, **changes: Any
) -> bytes:
    decoded = decode_card(card)
    fields = {"id": RAW_ID, "epoch": 1, "peer_id": decoded.id, "peer_epoch": decoded.epoch}
    fields |= {"link": next(_numbers), "transport": transport}
    return encode_greeting(GreetingKind.HELLO, version, encode(Hello(**fields | changes)))


def host_hello(
    card: bytes, nonce: Nonce | None = None, shared: Shared | None = None, **changes: Any
) -> bytes:
    """For the same host."""
    return hello(card, "samehost", body=encode(HostHello(nonce=nonce, shared=shared)), **changes)


def rdma_hello(card: bytes, rail: RailOffer | None = None, **changes: Any) -> bytes:
    return hello(card, "rdma", body=encode(RdmaHello(rail=rail)), **changes)


class RawSource:
    """A welcomed connection to an engine."""

    def __init__(self, card: bytes, transport: str = "tcp", **changes: Any) -> None:
        self.sock: socket.socket | RingEnd
        if transport == "samehost":
            rings = self.sock = RingSocket(card)
            changes = {"nonce": NONCE.nonce} | changes
            greeting = read_greeting(rings.greet(host_hello(card, **changes)))
        else:
            self.sock = dial(card)
            say = rdma_hello if transport == "rdma" else hello
            self.sock.sendall(say(card, **changes))
            greeting = read_greeting(self.sock)
        assert greeting is not None
        assert greeting.kind == GreetingKind.WELCOME

    def send(self, *parts: bytes) -> None:
        self.sock.sendall(b"".join(parts))

    def ack(self) -> Ack:
        data = read_exactly(self.sock, HEADER.size)
        assert data is not None, "no acknowledgement but the end"
        kind, status, _, count, transfer, _, _, _ = HEADER.unpack(data)
        assert kind == Kind.ACK
        reason = read_exactly(self.sock, count)
        assert reason is not None
        return Ack(transfer, AckStatus(status), reason.decode())

    def closed(self) -> bool:
        """Waits until the engine has closed the connection."""
        return read_exactly(self.sock, 1) is None


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
            offers={"tcp": b""},
            regions=[CardRegion(1, 1, "host")],
        )
        yield listener, encode(card)


def welcome(version: int = PROTOCOL_VERSION, **changes: Any) -> bytes:
    message = Welcome(**{"id": RAW_ID, "epoch": 1, "rails": 1} | changes)
    return encode_greeting(GreetingKind.WELCOME, version, encode(message))


def host_welcome(**changes: Any) -> bytes:
    """Of the first rail on the same host."""
    return welcome(body=encode(HostWelcome(nonce=NONCE.nonce)), **changes)


def rdma_welcome(rail: RailAnswer | None = None) -> bytes:
    return welcome(body=encode(RdmaWelcome(rail=rail)))


class RawListener:
    """What sources believe to be an engine, over TCP or on the same host: takes their links."""

    def __init__(self, transport: str) -> None:
        self._id, port = secrets.token_hex(16), 1
        if transport == "samehost":
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(f"\0te-{self._id}")
            self._listener.listen()
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            port = self._listener.getsockname()[1]
        self._listener.settimeout(TIMEOUT_S)
        self._is_samehost = transport == "samehost"
        self._card = encode(
            Card(
                protocol=PROTOCOL_VERSION, id=self._id, epoch=1, host="127.0.0.1", port=port,
                offers={transport: b""}, regions=[CardRegion(1, 1, "host")],
            )
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def connect(self, engine: te.Engine) -> tuple[te.Peer, socket.socket | RingEnd]:
        """A new link of the engine's with one rail; the one before must have ended."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            dialled = pool.submit(engine.connect, self._card)
            sock, _ = self._listener.accept()
            sock.settimeout(TIMEOUT_S)
            end: socket.socket | RingEnd = sock
            if self._is_samehost:
                end = accept_rings(sock)
            else:
                assert read_greeting(sock) is not None
            sock.sendall(host_welcome(id=self._id) if self._is_samehost else welcome(id=self._id))
            return dialled.result(TIMEOUT_S), end
