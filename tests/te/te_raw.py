# SPDX-License-Identifier: Apache-2.0
"""Both sides of the wire by hand, to say what a real engine never would."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import itertools
import os
import secrets
import socket
from collections.abc import Iterator
from typing import Any, Self

from te_frames import HEADER, Ack, AckStatus, Kind
from te_ring import RingEnd, RingSocket, accept_rings

import te
from te.connect.greeting import (
    GREETING,
    NONCE_BYTES,
    Greeting,
    GreetingKind,
    GreetingReader,
    Hello,
    Proven,
    encode_greeting,
    open_hello,
    seal_answer,
    seal_hello,
)
from te.handshake import (
    PROTOCOL_VERSION,
    Card,
    CardRegion,
    Refuse,
    Welcome,
    decode_body,
    decode_card,
    encode,
)
from te.proof import CHALLENGE_BYTES, PROOF_BYTES, null_key
from te.transports.rdma.messages import RailAnswer, RailOffer, RdmaHello, RdmaWelcome
from te.transports.samehost.messages import HostHello, HostWelcome, Nonce, Shared
from te.transports.samehost.reach import NonceMemory

TIMEOUT_S = 60.0
RAW_ID = "ab" * 16
#: What every same-host link begins with: bytes of this process.
NONCE = NonceMemory()
#: Of every destination by hand.
CHALLENGE = bytes(range(CHALLENGE_BYTES))
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


def take_challenge(sock: socket.socket) -> bytes:
    greeting = read_greeting(sock)
    assert greeting is not None, "no challenge but the end"
    assert greeting.kind == GreetingKind.CHALLENGE
    return greeting.body


def hello(
    to: socket.socket | bytes,
    card: bytes,
    transport: str = "tcp",
    version: int = PROTOCOL_VERSION,
    **changes: Any,
) -> bytes:
    """A whole greeting that answers a challenge, or the one that comes by the connection."""
    challenge = to if isinstance(to, bytes) else take_challenge(to)
    decoded = decode_card(card)
    fields = {"id": RAW_ID, "epoch": 1, "peer_id": decoded.id, "peer_epoch": decoded.epoch}
    fields |= {"link": next(_numbers), "transport": transport}
    said = Hello(**fields | changes)
    body, _ = seal_hello(said, challenge, os.urandom(NONCE_BYTES), null_key)
    return encode_greeting(GreetingKind.HELLO, version, body)


def host_hello(
    to: socket.socket | bytes,
    card: bytes,
    nonce: Nonce = NONCE.nonce,
    shared: Shared | None = None,
    **changes: Any,
) -> bytes:
    """For the same host."""
    return hello(
        to, card, "samehost", body=encode(HostHello(nonce=nonce, shared=shared)), **changes
    )


def rdma_hello(
    to: socket.socket | bytes, card: bytes, rail: RailOffer | None = None, **changes: Any
) -> bytes:
    return hello(to, card, "rdma", body=encode(RdmaHello(rail=rail)), **changes)


def said(greeting: Greeting | None) -> bytes:
    """What an answer says, behind its proof."""
    assert greeting is not None
    return greeting.body[PROOF_BYTES:]


def refusal(sock: socket.socket) -> Refuse:
    greeting = read_greeting(sock)
    assert greeting is not None
    assert greeting.kind == GreetingKind.REFUSE
    return decode_body(said(greeting), Refuse)


class RawSource:
    """A welcomed connection to an engine."""

    def __init__(self, card: bytes, transport: str = "tcp", **changes: Any) -> None:
        self.sock: socket.socket | RingEnd
        if transport == "samehost":
            rings = self.sock = RingSocket(card)
            greeting = read_greeting(rings.greet(host_hello(rings.sock, card, **changes)))
        else:
            self.sock = dial(card)
            if transport == "rdma":
                self.sock.sendall(rdma_hello(self.sock, card, **changes))
            else:
                self.sock.sendall(hello(self.sock, card, transport, **changes))
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


def descriptors() -> int:
    """How many this process has open, without those that earlier tests' engines have left for the
    garbage collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - pathlib keeps one open itself


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


def take_hello(sock: socket.socket) -> Proven:
    """Challenges the one who has dialled."""
    sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, CHALLENGE))
    greeting = read_greeting(sock)
    assert greeting is not None, "no hello but the end"
    return open_greeting(greeting.body)


def open_greeting(body: bytes) -> Proven:
    proven = open_hello(body, CHALLENGE, null_key)
    assert proven is not None
    return proven


def welcome(proven: Proven, version: int = PROTOCOL_VERSION, **changes: Any) -> bytes:
    message = Welcome(**{"rails": 1} | changes)
    body = seal_answer(GreetingKind.WELCOME, encode(message), proven.proof, null_key)
    return encode_greeting(GreetingKind.WELCOME, version, body)


def host_welcome(proven: Proven) -> bytes:
    """Of a rail on the same host."""
    return welcome(proven, body=encode(HostWelcome(nonce=NONCE.nonce)))


def rdma_welcome(proven: Proven, rail: RailAnswer | None = None) -> bytes:
    return welcome(proven, body=encode(RdmaWelcome(rail=rail)))


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
                sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, CHALLENGE))
                end, data = accept_rings(sock)
                sock.sendall(host_welcome(open_greeting(data[GREETING.size :])))
            else:
                sock.sendall(welcome(take_hello(sock)))
            return dialled.result(TIMEOUT_S), end
