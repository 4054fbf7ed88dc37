# SPDX-License-Identifier: Apache-2.0
"""Opening connections to an engine and exchanging greetings; blocking, with one deadline."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from te.connect.greeting import (
    CHALLENGE_BODY,
    NONCE_BYTES,
    Greeting,
    GreetingKind,
    GreetingReader,
    Hello,
    Turn,
    encode_call,
    encode_greeting,
    open_answer,
    open_challenge,
    seal_hello,
)
from te.errors import ConnectError, HandshakeError, KeyMismatch, ProtocolViolation, VersionError
from te.handshake import (
    PROTOCOL_VERSION,
    Card,
    Refusal,
    Refuse,
    Welcome,
    decode_body,
    version_mismatch,
)
from te.proof import NO_KEY, PROOF_BYTES, Key, session_key
from te.transports.base import Local, TransportRefused

__all__ = [
    "Dialled",
    "add_rails",
    "address_text",
    "blame",
    "connect",
    "greet",
    "hello_to",
    "insist",
    "tune",
]

# An idle connection to a vanished host is given up after about 5 + 3 x 2 seconds.
KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 2
KEEPALIVE_PROBES = 3
DIALS_MAX = 8
DIAL_PAUSE_S = 0.05
# A host that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s: one
# that was cut off would be found up to 4 s after it is back.
DIAL_S = 0.9

_Rail = TypeVar("_Rail", bound="Dialled")


@dataclass(frozen=True)
class Dialled:
    """A welcomed, non-blocking connection."""

    sock: socket.socket
    welcome: Welcome
    #: The session key of its link, which later connections prove.
    session: Key
    #: The proof of its hello.
    hello: bytes

    def close(self) -> None:
        """Closes a connection that the plane does not get."""
        self.sock.close()

    def fileno(self) -> int:
        """The descriptor of its socket."""
        return self.sock.fileno()


def address_text(host: str, port: int) -> str:
    """``host:port``, with brackets where the host has colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tune(sock: socket.socket, stall_timeout_s: float) -> None:
    """Options for every TCP connection, both sides; tcp(7), socket(7)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    # A rail that is cut off while its data waits in the kernel: other rails may go on, so nothing
    # above would notice. Twice the stall timeout, so that a frozen peer is called just that.
    user_timeout_ms = min(int(2000 * stall_timeout_s), 1 << 30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)


def hello_to(card: Card, local: Local, transport: str, number: int, body: bytes = b"") -> Hello:
    """The hello of a connection to the engine of the card, about the link ``number``."""
    return Hello(
        id=local.id,
        epoch=local.epoch,
        peer_id=card.id,
        peer_epoch=card.epoch,
        link=number,
        transport=transport,
        body=body,
    )


@contextlib.contextmanager
def blame(card: Card, where: str, timeout_s: float) -> Iterator[None]:
    """Turns what the system says about a connection into ``te.ConnectError``."""
    try:
        yield
    except TimeoutError:
        raise ConnectError(
            f"the engine {card.id} at {where} did not answer within {timeout_s} s"
        ) from None
    except OSError as exc:
        cause = exc.strerror or str(exc)
        raise ConnectError(f"cannot connect to the engine {card.id} at {where}: {cause}") from exc


def greet(
    local: Local,
    sock: socket.socket,
    hello: Hello,
    card: Card,
    where: str,
    deadline_s: float,
    fds: Sequence[int] = (),
    session: Key | None = None,
    proven: Callable[[], None] | None = None,
) -> Dialled:
    """Calls, has the other side prove that it is the engine of the card, says the hello, with
    descriptors if any (unix sockets only), and waits for the welcome; closes the socket on any
    error. ``session``: of the link, which stands; without it the hello begins one. ``proven``: what
    is done for the other side once it has proved itself, before it is told anything.

    Raises ``OSError``, ``te.ConnectError``, ``te.VersionError``, ``te.HandshakeError``,
    ``TransportRefused``.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        try:
            turn = _call(sock, card, where, deadline_s, local.keys, session)
            if proven is not None:
                proven()
            body, proof = seal_hello(hello, turn)
            _send(sock, GreetingKind.HELLO, body, deadline_s, fds)
            greeting = _read_greeting(sock, deadline_s)
        except ProtocolViolation as exc:
            raise HandshakeError(f"{where}: {exc}") from None
        welcome = _check_answer(greeting, open_answer(greeting, proof, turn.key), where)
        if session is None:
            session = session_key(turn.key, proof, greeting.body[:PROOF_BYTES])
        sock.setblocking(False)
        undo.pop_all()
        return Dialled(sock, welcome, session, proof)


def _call(
    sock: socket.socket,
    card: Card,
    where: str,
    deadline_s: float,
    keys: tuple[Key, ...],
    session: Key | None,
) -> Turn:
    """Speaks first, and takes the challenge: nothing of this engine is said before the other has
    proved that it is the one of the card."""
    kind = GreetingKind.CALL
    if session is not None:
        kind, keys = GreetingKind.CALL_LINK, (session,)
    call = Greeting(PROTOCOL_VERSION, kind, encode_call(os.urandom(NONCE_BYTES), keys))
    _send(sock, kind, call.body, deadline_s)
    challenge = _read_greeting(sock, deadline_s)
    _check_version(challenge, where)
    if challenge.kind == GreetingKind.REFUSE and not challenge.body:
        kind_of_error = KeyMismatch if session is None else ConnectError
        raise kind_of_error(
            f"{where} refused this engine and closed the connection: {_no_key(session, keys)}"
        )
    if challenge.kind != GreetingKind.CHALLENGE or len(challenge.body) != CHALLENGE_BODY.size:
        raise HandshakeError(
            f"{where} began with a greeting of kind {challenge.kind} and"
            f" {len(challenge.body)} bytes instead of a challenge"
        )
    turn = open_challenge(challenge.body, call, keys, card.id, card.epoch)
    if turn is None:
        raise ConnectError(
            f"{where} does not prove to be the engine {card.id} of the card: it was restarted or"
            " another one took its port; get its new card"
        )
    return turn


def _no_key(session: Key | None, keys: tuple[Key, ...]) -> str:
    """What a refusal of the call says."""
    if session is not None:
        return "the link that this connection is for has ended there"
    if keys == (NO_KEY,):
        return (
            "it has keys, and this engine has none; give both the same secret (keys in te.Config)"
        )
    return (
        f"it has none of the {len(keys)} keys of this engine, or no key at all; give both the same"
        " secret (keys in te.Config)"
    )


def _send(
    sock: socket.socket,
    kind: GreetingKind,
    body: bytes,
    deadline_s: float,
    fds: Sequence[int] = (),
) -> None:
    sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
    data = encode_greeting(kind, PROTOCOL_VERSION, body)
    # One that refuses at once may have closed already: its reason is still to be read.
    with contextlib.suppress(BrokenPipeError):
        if fds:
            # A new connection's empty buffer takes it whole.
            socket.send_fds(sock, [data], fds)
        else:
            sock.sendall(data)


def insist(dial: Callable[[], _Rail], deadline_s: float) -> _Rail:
    """Dials again when the other side closes before its welcome: an engine to which too many
    connect at once closes one that is silent or old (``te.connect.admission``), and that may be
    ours when this process was held up before its hello. Raises as ``dial`` does, at the last try or
    at the deadline."""
    for _ in range(DIALS_MAX - 1):
        try:
            return dial()
        except ConnectionResetError:
            if time.monotonic() + DIAL_PAUSE_S >= deadline_s:
                raise
            time.sleep(DIAL_PAUSE_S)
    return dial()


def connect(
    local: Local,
    card: Card,
    hello: Hello,
    deadline_s: float,
    timeout_s: float,
    session: Key | None = None,
) -> Dialled:
    """A welcomed connection to the host and port of the card, of a new link or of the one with that
    session; raises as ``greet``, but for ``OSError``."""
    where, config = address_text(card.host, card.port), local.config
    source = None if config.source_host is None else (config.source_host, 0)
    try:
        socket.getaddrinfo(card.host, card.port, flags=socket.AI_NUMERICHOST)
    except OSError:
        # Looking a name up knows no deadline, and connecting to each of its addresses several.
        raise ConnectError(
            f"the card of the engine {card.id} has the host {card.host!r}, which is no numeric"
            " address; engines put nothing else on their cards"
        ) from None

    def dial() -> Dialled:
        with contextlib.ExitStack() as undo:
            sock = _reached((card.host, card.port), source, deadline_s)
            undo.callback(sock.close)
            tune(sock, config.stall_timeout_s)
            if config.socket_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
            dialled = greet(local, sock, hello, card, where, deadline_s, (), session)
            undo.pop_all()
            return dialled

    with blame(card, where, timeout_s):
        return insist(dial, deadline_s)


def _reached(
    address: tuple[str, int], source: tuple[str, int] | None, deadline_s: float
) -> socket.socket:
    """A connection to a numeric address, which is dialled until it answers; ``OSError``."""
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        try:
            return socket.create_connection(address, min(left_s, DIAL_S), source)
        except TimeoutError:
            if left_s <= DIAL_S:
                raise


def add_rails(
    first: _Rail, dial: Callable[[Key], _Rail], rails: int, add: Callable[[_Rail], bool]
) -> None:
    """Has ``add`` hand the first connection to the plane, and as many more as both sides want; it
    says whether the link took it. ``dial`` gets the link's session key."""
    dialled = [first]
    try:
        while len(dialled) < min(rails, first.welcome.rails):
            dialled.append(dial(first.session))
        while dialled:
            if add(dialled[0]):
                dialled.pop(0).sock.detach()
            else:
                dialled.pop(0).close()  # The link has died already, and has the reason.
    finally:
        for one in dialled:
            one.close()


def _read_greeting(sock: socket.socket, deadline_s: float) -> Greeting:
    reader = GreetingReader()
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        sock.settimeout(left_s)
        nbytes = sock.recv_into(reader.room())
        if not nbytes:
            raise ConnectionResetError("the other side closed the connection instead of a welcome")
        greeting = reader.filled(nbytes)
        if greeting is not None:
            return greeting


def _check_answer(greeting: Greeting, said: bytes | None, where: str) -> Welcome:
    """``said``: what the greeting says, if it proves to be an answer."""
    _check_version(greeting, where)
    if greeting.kind not in (GreetingKind.WELCOME, GreetingKind.REFUSE):
        raise HandshakeError(f"{where} answered with a greeting of kind {greeting.kind}")
    if said is None:
        raise HandshakeError(f"{where} answered without a proof that it has read the hello")
    if greeting.kind == GreetingKind.WELCOME:
        return decode_body(said, Welcome)
    refuse = decode_body(said, Refuse)
    if refuse.code is Refusal.TRANSPORT:
        raise TransportRefused(refuse.reason)
    raise ConnectError(f"{where} refused the connection: {refuse.reason}")


def _check_version(greeting: Greeting, where: str) -> None:
    if greeting.version != PROTOCOL_VERSION:
        raise VersionError(version_mismatch(f"the engine at {where}", greeting.version))
