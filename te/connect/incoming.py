# SPDX-License-Identifier: Apache-2.0
"""One incoming connection, until its hello is answered."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Callable
from typing import Protocol

from te.connect.admission import HalfOpen
from te.connect.foreign import close_foreign, drop_unread, receive_descriptors
from te.connect.greeting import (
    CALL_BODY_MAX,
    CALL_KINDS,
    HELLO_BODY_MAX,
    Greeting,
    GreetingKind,
    GreetingReader,
    Hello,
    Proven,
    Turn,
    called_keys,
    encode_greeting,
    open_hello,
    seal_answer,
    seal_challenge,
)
from te.connect.loop import IoLoop
from te.connect.transports import EngineTransports
from te.errors import HandshakeError, ProtocolViolation
from te.handshake import (
    PROTOCOL_VERSION,
    REASON_CHARS_MAX,
    Refusal,
    Refuse,
    Welcome,
    encode,
)
from te.proof import CHALLENGE_BYTES, NO_KEY, session_key
from te.tags import Identity, packed_peer
from te.transports.base import (
    Answer,
    Call,
    IncomingLink,
    Join,
    LinkKey,
    Local,
    Transport,
    TransportRefused,
    Work,
)

__all__ = ["Incoming"]

logger = logging.getLogger(__name__)


class Acceptor(Protocol):
    """What a connection asks of the engine's accepting side (``te.connect.accept``), all on its
    thread."""

    local: Local
    transports: EngineTransports
    loop: IoLoop

    def called(self, half_open: HalfOpen) -> None:
        """A connection has called, and was challenged."""

    def introduced(self, half_open: HalfOpen) -> None:
        """A connection's hello is whole, or it was closed."""

    def forget(self, incoming: Incoming) -> None:
        """A connection was closed or handed over."""

    def log(self, level: int, message: str, *values: object) -> None:
        """A line about a stranger."""

    def limit(self, source: str) -> str | None:
        """Why no more connections of that source become rails."""

    def link(self, key: LinkKey) -> IncomingLink | None:
        """The open one."""

    def link_of(self, session: bytes) -> IncomingLink | None:
        """The open one whose session key has that identifier."""

    def misfit(self, link: IncomingLink) -> str | None:
        """Why a connection cannot be one more of the link."""

    def joined(self, sock: socket.socket, join: Join, link: IncomingLink) -> str | None:
        """Takes a connection that was welcomed into its link."""

    def check_waiting(self) -> None:
        """``TransportRefused`` if too many connections wait for work."""


class Incoming:
    """Belongs to the acceptor's thread. Whatever goes wrong costs this connection and no other."""

    def __init__(
        self,
        acceptor: Acceptor,
        sock: socket.socket,
        where: str,
        owner: Transport | None,
        takes_descriptor: bool,
        half_open: HalfOpen,
    ) -> None:
        """``owner``: whose listener it came by, if that is one of a transport's own."""
        self._acceptor = acceptor
        self._local = acceptor.local
        self._sock = sock
        self._fd = sock.fileno()
        self._where = where
        self._owner = owner
        self._takes_descriptor = takes_descriptor
        self._half_open = half_open
        self._reader = GreetingReader(CALL_BODY_MAX)
        #: What its hello has to answer, once it has called, and the link whose session key that is.
        self._turn: Turn | None = None
        self._link: IncomingLink | None = None
        #: Its hello, once that has been found good.
        self._proven: Proven | None = None
        #: The descriptor that came with the hello, if any.
        self._fds: list[int] = []
        #: What its transport makes of it, once its hello is whole.
        self._join: Join | None = None
        self._is_released = False

    def check_deadline(self, now_s: float) -> float:
        """Closes it if it has not introduced itself in time; returns when it must have."""
        due_s = self._half_open.due_s
        if now_s >= due_s:
            had = "no whole hello" if self._half_open.has_spoken else "not a byte"
            self.close(f"{had} in time")
        return due_s

    def close(self, reason: str) -> None:
        """Closes it and says why in the log; idempotent."""
        if self._sock.fileno() >= 0:
            self._acceptor.log(
                logging.INFO, "closing the connection from %s: %s", self._where, reason
            )
        self._release()
        if self._takes_descriptor and self._sock.fileno() >= 0:
            drop_unread(self._sock)
        while self._fds:
            close_foreign(self._fds.pop())
        if self._join is not None:
            self._join.close()
            self._join = None
        self._sock.close()

    def on_ready(self, _events: int) -> None:
        """Handler for the loop."""
        self._guard(self._take)

    def _guard(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BlockingIOError:
            return
        except (ProtocolViolation, HandshakeError) as exc:
            self._acceptor.log(logging.WARNING, "%s broke the protocol: %s", self._where, exc)
            self.close("broken protocol")
        except OSError as exc:
            self.close(exc.strerror or str(exc))
        except Exception as exc:  # noqa: BLE001 - logged; it must cost this connection alone
            text = "".join(traceback.format_exception(exc))
            self._acceptor.log(logging.ERROR, "a bug in greeting %s: %s", self._where, text)
            self.close("internal error of this engine")

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._acceptor.introduced(self._half_open)
            self._acceptor.forget(self)
            self._acceptor.loop.forget(self._fd)

    def _take(self) -> None:
        greeting = self._read()
        if greeting is None:
            return
        if self._turn is None:
            self._reader = GreetingReader(HELLO_BODY_MAX)
            self._challenge(greeting)
        else:
            self._acceptor.introduced(self._half_open)
            self._greet(greeting, self._turn)

    def _read(self) -> Greeting | None:
        room = self._reader.room()
        if self._takes_descriptor:
            data, fds = receive_descriptors(self._sock, len(room))
            self._fds += fds
            if fds and self._turn is None:
                raise ProtocolViolation("a call with a descriptor")
            if len(self._fds) > 1:
                raise ProtocolViolation("a hello with more than one descriptor")
            room[: len(data)] = data
            nbytes = len(data)
        else:
            nbytes = self._sock.recv_into(room)
        if not nbytes:
            raise ConnectionResetError("closed by the peer")
        self._half_open.has_spoken = True
        return self._reader.filled(nbytes)

    def _challenge(self, call: Greeting) -> None:
        """Proves which engine this is, with a key that the other side has, too."""
        if call.version != PROTOCOL_VERSION:
            self._turn_away(f"it speaks te protocol {call.version}")
            return
        if call.kind not in CALL_KINDS:
            raise ProtocolViolation(f"a greeting of kind {call.kind} instead of a call")
        called = called_keys(call)
        if call.kind == GreetingKind.CALL_LINK:
            self._link = self._acceptor.link_of(called[0])
            key = None if self._link is None else self._link.session
            problem = "the link that it names has ended, or never existed"
        else:
            keys = {one.id: one for one in self._local.keys}
            key = next((keys[one] for one in called if one in keys), None)
            problem = "" if key is not None else _wrong_key(NO_KEY.id in called, NO_KEY.id in keys)
        if key is None:
            self._turn_away(problem)
            return
        local, challenge = self._local, os.urandom(CHALLENGE_BYTES)
        body, self._turn = seal_challenge(call, challenge, key, local.id, local.epoch)
        self._send(encode_greeting(GreetingKind.CHALLENGE, PROTOCOL_VERSION, body))
        self._acceptor.called(self._half_open)

    def _greet(self, greeting: Greeting, turn: Turn) -> None:
        """Tells strangers nothing: they are those who cannot answer the challenge for this engine,
        in this version."""
        if greeting.kind != GreetingKind.HELLO:
            raise ProtocolViolation(f"a greeting of kind {greeting.kind} instead of a hello")
        if greeting.version != PROTOCOL_VERSION:
            self._turn_away(f"it speaks te protocol {greeting.version}")
            return
        self._proven = open_hello(greeting.body, turn)
        if self._proven is None:
            self._turn_away("its hello does not answer the challenge")
            return
        hello = self._proven.hello
        if (hello.peer_id, hello.peer_epoch) != (self._local.id, self._local.epoch):
            self._turn_away(f"its hello is for the engine {hello.peer_id}")
            return
        if self._link is not None and self._link.key != _key_of(hello):
            self._turn_away("its hello is for another link than the session key that it proves")
            return
        transport = self._acceptor.transports.get(hello.transport)
        if transport is None:
            self._refuse(Refusal.TRANSPORT, f"this engine does not offer {hello.transport}")
        elif (self._owner is transport) != transport.has_listener:
            raise ProtocolViolation(f"a hello for {transport.name} by another way than its own")
        else:
            try:
                self._hand_to(transport, hello)
            except TransportRefused as exc:
                self._refuse(Refusal.TRANSPORT, str(exc))

    def _hand_to(self, transport: Transport, hello: Hello) -> None:
        key, link = _key_of(hello), self._link
        problem = self._acceptor.transports.problem(transport)
        if problem is None and link is not None and link.transport is not transport:
            problem = "the link that it names is over another transport"
        if problem is not None:
            raise TransportRefused(problem)
        self._check_new(key, link)
        accepted = transport.accept(self._call(key, hello.body), link)
        match accepted:
            case Answer(what, body):
                self._answer(what, body)
            case Work(what, run):
                self._later(what, run, lambda body: self._answer(what, body))
            case join:
                self._join = join
                if join.may_block:
                    self._later("a check", join.check, lambda body: self._welcome(join, link, body))
                else:
                    self._welcome(join, link, join.check())

    def _check_new(self, key: LinkKey, link: IncomingLink | None) -> None:
        if link is None and self._acceptor.link(key) is not None:
            raise TransportRefused("an earlier connection of this link was welcomed; connect again")

    def _call(self, key: LinkKey, body: bytes) -> Call:
        assert self._proven is not None
        return Call(key, body, self._sock, self._where, self._proven.proof, self._fds)

    def _welcome(self, join: Join, link: IncomingLink | None, body: bytes) -> None:
        assert self._proven is not None
        limit = self._acceptor.limit(self._half_open.source)
        if limit is not None:
            self._refuse(Refusal.LIMIT, limit)
            return
        self._check_new(_key_of(self._proven.hello), link)
        problem = None if link is None else self._acceptor.misfit(link)
        if problem is not None:
            raise TransportRefused(problem)
        if link is None:
            link = join.begin()
            link.handle.name_peer(packed_peer(Identity(*link.key[:2])))
        link.source = self._half_open.source
        welcome = Welcome(rails=self._local.config.rails, body=body)
        answer = self._say(GreetingKind.WELCOME, welcome)
        if link.session is None:
            link.session = session_key(self._proven.key, self._proven.proof, answer)
        self._release()
        problem = self._acceptor.joined(self._sock, join, link)
        if problem is None:
            self._fds.clear()
        self.close(problem or "")

    def _later(self, what: str, work: Callable[[], bytes], then: Callable[[bytes], None]) -> None:
        """Does the work on another thread, and goes on with what it returns; or says why it was
        not done."""

        def run() -> None:
            body, problem = b"", ""
            try:
                body = work()
            except TransportRefused as exc:
                problem = str(exc)
            except OSError as exc:
                problem = exc.strerror or str(exc)
            except Exception as exc:
                logger.exception("a bug in %s for %s", what, self._where)
                problem = f"internal error of this engine: {exc!r}"
            self._acceptor.loop.call(lambda: self._guard(lambda: go_on(body, problem)))

        def go_on(body: bytes, problem: str) -> None:
            if self._sock.fileno() < 0:
                return  # The connection was closed meanwhile: the work took too long.
            try:
                if problem:
                    raise TransportRefused(problem)
                then(body)
            except TransportRefused as exc:
                self._refuse(Refusal.TRANSPORT, str(exc))

        self._acceptor.check_waiting()
        self._acceptor.loop.rewatch(self._fd, 0)  # There is nothing to read before the answer.
        if not self._local.run(run):
            self.close("this engine was closed, or can start no thread")

    def _answer(self, what: str, body: bytes) -> None:
        self._say(GreetingKind.WELCOME, Welcome(rails=1, body=body))
        self.close(f"it asked for {what}, and that is done")

    def _refuse(self, code: Refusal, reason: str) -> None:
        self._acceptor.log(logging.WARNING, "%s refused: %s", self._where, reason)
        self._say(GreetingKind.REFUSE, Refuse(code=code, reason=reason[:REASON_CHARS_MAX]))
        self.close("refused")

    def _turn_away(self, reason: str) -> None:
        """Refuses it without a word; the reason is for the log here."""
        self._acceptor.log(logging.WARNING, "%s refused: %s", self._where, reason)
        self._send(encode_greeting(GreetingKind.REFUSE, PROTOCOL_VERSION, b""))
        self.close("refused")

    def _say(self, kind: GreetingKind, body: Welcome | Refuse) -> bytes:
        """To one whose hello is good; returns the proof."""
        assert self._proven is not None
        sealed, proof = seal_answer(kind, encode(body), self._proven)
        self._send(encode_greeting(kind, PROTOCOL_VERSION, sealed))
        return proof

    def _send(self, data: bytes) -> None:
        # All that is said in a greeting is so little that the buffer takes it whole.
        self._sock.send(data)


def _key_of(hello: Hello) -> LinkKey:
    return LinkKey(hello.id, hello.epoch, hello.link)


def _wrong_key(is_without: bool, are_without: bool) -> str:
    """A sentence for the log: why the two sides have no key in common."""
    if is_without:
        why = "it has no key, and this engine has some"
    elif are_without:
        why = "it has keys, and this engine has none"
    else:
        why = "none of its keys is one of this engine's"
    return f"wrong key: {why}; give both the same secret"
