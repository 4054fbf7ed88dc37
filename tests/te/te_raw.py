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
import weakref
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
    Turn,
    called_keys,
    encode_call,
    encode_greeting,
    open_challenge,
    open_hello,
    seal_answer,
    seal_challenge,
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
from te.proof import CHALLENGE_BYTES, NO_KEY, PROOF_BYTES, Key, keys_of, session_key
from te.transports.rdma.messages import RailAnswer, RailOffer, RdmaHello, RdmaWelcome
from te.transports.samehost.messages import HostHello, HostWelcome, Nonce, Shared
from te.transports.samehost.reach import NonceMemory

TIMEOUT_S = 60.0
RAW_ID = "ab" * 16
#: What every same-host link begins with: bytes of this process.
NONCE = NonceMemory()
#: Of every destination by hand.
CHALLENGE = bytes(range(CHALLENGE_BYTES))
#: Of a hello that answers no challenge at all.
BLIND = Turn(NO_KEY, CHALLENGE)
_numbers = itertools.count(1 << 20)

#: The keys of all that is said by hand.
KEYS = [NO_KEY]
#: What hellos by hand have proven, until their welcome comes; session keys of links by hand.
_said: weakref.WeakKeyDictionary[socket.socket, tuple[tuple[str, int], Key, bytes]]
_said = weakref.WeakKeyDictionary()
_sessions: dict[tuple[str, int], Key] = {}
_sessions_taken: dict[bytes, Key] = {}


@contextlib.contextmanager
def with_keys(*keys: bytes) -> Iterator[None]:
    """What is said by hand is proved with these."""
    before, KEYS[:] = KEYS[:], keys_of(keys)
    try:
        yield
    finally:
        KEYS[:] = before


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
            if greeting.kind == GreetingKind.WELCOME and sock in _said:
                link, key, proof = _said.pop(sock)
                _sessions[link] = session_key(key, proof, greeting.body[:PROOF_BYTES])
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


def take_challenge(
    sock: socket.socket, card: bytes, session: Key | None = None, keys: tuple[Key, ...] = ()
) -> Turn:
    """Calls the engine of the card; ``ConnectionRefusedError`` if it answers without a word."""
    kind = GreetingKind.CALL if session is None else GreetingKind.CALL_LINK
    keys = keys or (tuple(KEYS) if session is None else (session,))
    call = Greeting(PROTOCOL_VERSION, kind, encode_call(os.urandom(NONCE_BYTES), keys))
    sock.sendall(encode_greeting(kind, PROTOCOL_VERSION, call.body))
    greeting = read_greeting(sock)
    assert greeting is not None, "no challenge but the end"
    if greeting == Greeting(PROTOCOL_VERSION, GreetingKind.REFUSE, b""):
        raise ConnectionRefusedError
    assert greeting.kind == GreetingKind.CHALLENGE
    decoded = decode_card(card)
    turn = open_challenge(greeting.body, call, keys, decoded.id, decoded.epoch)
    assert turn is not None
    return turn


def hello(
    to: socket.socket | Turn,
    card: bytes,
    transport: str = "tcp",
    version: int = PROTOCOL_VERSION,
    joins: bool = True,
    **changes: Any,
) -> bytes:
    """A whole greeting that answers a challenge, or the one that comes by the connection. That is
    for a link by hand which stands, if ``joins`` and it has that number."""
    decoded = decode_card(card)
    fields = {"id": RAW_ID, "epoch": 1, "peer_id": decoded.id, "peer_epoch": decoded.epoch}
    fields |= {"link": next(_numbers), "transport": transport}
    said = Hello(**fields | changes)
    link = (decoded.id, said.link)
    session = _sessions.get(link) if joins else None
    turn = to if isinstance(to, Turn) else take_challenge(to, card, session)
    body, proof = seal_hello(said, turn)
    if isinstance(to, socket.socket) and session is None:
        _said[to] = (link, turn.key, proof)
    return encode_greeting(GreetingKind.HELLO, version, body)


def session_of(card: bytes, link: int) -> Key:
    """Of a link by hand that was welcomed by the engine of the card."""
    return _sessions[decode_card(card).id, link]


def knows_session(card: bytes, link: int, secret: bytes) -> None:
    """As if it had been opened here."""
    _sessions[decode_card(card).id, link] = Key(secret)


def host_hello(
    to: socket.socket | Turn,
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
    to: socket.socket | Turn, card: bytes, rail: RailOffer | None = None, **changes: Any
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
    """A welcomed connection to an engine: the first of a link."""

    def __init__(self, card: bytes, transport: str = "tcp", **changes: Any) -> None:
        changes["joins"] = False
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


def take_call(sock: socket.socket, id_: str = RAW_ID) -> Turn:
    """Challenges the one who has dialled."""
    call = read_greeting(sock)
    assert call is not None, "no call but the end"
    if call.kind == GreetingKind.CALL:
        known = {one.id: one for one in KEYS}
    else:
        assert call.kind == GreetingKind.CALL_LINK
        known = _sessions_taken
    key = next(known[one] for one in called_keys(call) if one in known)
    body, turn = seal_challenge(call, CHALLENGE, key, id_, 1)
    sock.sendall(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, body))
    return turn


def take_hello(sock: socket.socket, id_: str = RAW_ID) -> Proven:
    """Challenges the one who has dialled, and hears who it is."""
    turn = take_call(sock, id_)
    greeting = read_greeting(sock)
    assert greeting is not None, "no hello but the end"
    return open_greeting(greeting.body, turn)


def open_greeting(body: bytes, turn: Turn) -> Proven:
    proven = open_hello(body, turn)
    assert proven is not None
    return proven


def welcome(proven: Proven, version: int = PROTOCOL_VERSION, **changes: Any) -> bytes:
    message = Welcome(**{"rails": 1} | changes)
    body, proof = seal_answer(GreetingKind.WELCOME, encode(message), proven)
    session = session_key(proven.key, proven.proof, proof)
    _sessions_taken[session.id] = session
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
            dialled = pool.submit(engine.connect, self._card, TIMEOUT_S)
            sock, _ = self._listener.accept()
            sock.settimeout(TIMEOUT_S)
            end: socket.socket | RingEnd = sock
            if self._is_samehost:
                turn = take_call(sock, self._id)
                end, data = accept_rings(sock)
                sock.sendall(host_welcome(open_greeting(data[GREETING.size :], turn)))
            else:
                sock.sendall(welcome(take_hello(sock, self._id)))
            return dialled.result(TIMEOUT_S), end
