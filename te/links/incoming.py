# SPDX-License-Identifier: Apache-2.0
"""One incoming connection, until its hello is answered."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te.errors import HandshakeError, ProtocolViolation
from te.handshake import (
    PROTOCOL_VERSION,
    Hello,
    RailAnswer,
    RailOffer,
    Refusal,
    Refuse,
    Welcome,
    decode_body,
    encode,
    version_mismatch,
)
from te.links import samehost
from te.links.dial import tune
from te.links.greeting import Greeting, GreetingKind, GreetingReader, encode_greeting

if TYPE_CHECKING:
    from te.links.accept import Acceptor

__all__ = ["Greeted", "Incoming"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Greeted:
    """A connection that has introduced itself well."""

    sock: socket.socket
    where: str
    is_samehost: bool
    hello: Hello
    #: Same host only: memory file of the rail.
    rings_fd: int


class Incoming:
    """Belongs to the acceptor's thread."""

    def __init__(
        self, acceptor: Acceptor, sock: socket.socket, where: str, is_samehost: bool
    ) -> None:
        self._acceptor = acceptor
        self._local = acceptor.local
        self._sock = sock
        self._fd = sock.fileno()
        self._where = where
        self._is_samehost = is_samehost
        self._until_s = time.monotonic() + self._local.config.connect_timeout_s
        self._reader = GreetingReader()
        #: Descriptors that came with the hello.
        self._fds: list[int] = []

    def check_deadline(self, now_s: float) -> float:
        """Closes it if it has not introduced itself in time; returns when it must have."""
        if now_s >= self._until_s:
            self.close(f"no hello within {self._local.config.connect_timeout_s} s")
        return self._until_s

    def close(self, reason: str) -> None:
        """Closes it and says why in the log."""
        logger.info("closing the connection from %s: %s", self._where, reason)
        self._release()
        self._sock.close()

    def on_ready(self, _events: int) -> None:
        """Handler for the loop."""
        try:
            greeting = self._read()
            if greeting is not None:
                self._greet(greeting)
        except BlockingIOError:
            return
        except (ProtocolViolation, HandshakeError) as exc:
            logger.warning("%s broke the protocol: %s", self._where, exc)
            self.close("broken protocol")
        except OSError as exc:
            self.close(exc.strerror or str(exc))

    def _release(self) -> None:
        self._acceptor.loop.forget(self._fd)
        self._acceptor.forget(self)
        while self._fds:
            os.close(self._fds.pop())

    def _read(self) -> Greeting | None:
        room = self._reader.room()
        if self._is_samehost:
            data, fds, _, _ = socket.recv_fds(self._sock, len(room), 1)
            self._fds += fds
            room[: len(data)] = data
            nbytes = len(data)
        else:
            nbytes = self._sock.recv_into(room)
        if not nbytes:
            raise ConnectionResetError("closed by the peer")
        return self._reader.filled(nbytes)

    def _greet(self, greeting: Greeting) -> None:
        if greeting.version != PROTOCOL_VERSION:
            who = f"the engine at {self._where}"
            self._refuse(Refusal.VERSION, version_mismatch(who, greeting.version))
            return
        if greeting.kind != GreetingKind.HELLO:
            raise ProtocolViolation(f"a greeting of kind {greeting.kind} instead of a hello")
        hello = decode_body(greeting.body, Hello)
        if (hello.peer_id, hello.peer_epoch) != (self._local.id, self._local.epoch):
            self._refuse(
                Refusal.IDENTITY,
                f"this is the engine {self._local.id}, not {hello.peer_id} of the card: it was"
                " restarted or another one took its port; get its new card",
            )
        elif hello.shared is not None:
            self._map(hello)
        elif hello.rail is not None:
            self._make_rail(hello, hello.rail)
        else:
            self._welcome(hello)

    def _welcome(self, hello: Hello) -> None:
        nonce = None
        if self._is_samehost and not self._fds:
            raise ProtocolViolation("a rail on the same host without memory for its rings")
        if self._is_samehost and hello.is_direct:
            raise ProtocolViolation("a link over RDMA through the socket for the same host")
        if self._is_samehost and hello.nonce is not None:
            problem = samehost.cannot_read(samehost.peer_pid(self._sock), hello.nonce)
            if problem is not None:
                self._refuse(Refusal.TRANSPORT, problem)
                return
            nonce = self._acceptor.nonce
        if hello.is_direct and self._local.fabric is None:
            self._refuse(Refusal.TRANSPORT, self._local.fabric_problem)
            return
        config = self._local.config
        if not self._is_samehost:
            tune(self._sock, config.stall_timeout_s)
        self._say(
            GreetingKind.WELCOME,
            Welcome(id=self._local.id, epoch=self._local.epoch, rails=config.rails, nonce=nonce),
        )
        rings_fd = self._fds.pop() if self._is_samehost else -1
        self._release()
        problem = self._acceptor.greeted(
            Greeted(self._sock, self._where, self._is_samehost, hello, rings_fd)
        )
        if problem is not None:
            logger.info("closing the connection from %s: %s", self._where, problem)
            self._sock.close()
            if rings_fd >= 0:
                os.close(rings_fd)

    def _make_rail(self, hello: Hello, offer: RailOffer) -> None:
        def make() -> None:
            answer = self._acceptor.make_rail(hello, offer)
            self._acceptor.loop.call(lambda: self._answer_rail(answer))

        self._acceptor.loop.rewatch(self._fd, 0)  # There is nothing to read before the answer.
        if not self._local.keeper.run(make):
            self.close("this engine was closed")

    def _answer_rail(self, answer: RailAnswer | str) -> None:
        if self._sock.fileno() < 0:
            return  # It took too long.
        if isinstance(answer, str):
            self._refuse(Refusal.TRANSPORT, answer)
            return
        welcome = Welcome(id=self._local.id, epoch=self._local.epoch, rails=1, rail=answer)
        self._say(GreetingKind.WELCOME, welcome)
        self.close("its rail is made")

    def _map(self, hello: Hello) -> None:
        problem = self._acceptor.map_shared(hello, self._fds[0] if self._fds else None)
        if problem is not None:
            self._refuse(Refusal.TRANSPORT, problem)
            return
        welcome = Welcome(id=self._local.id, epoch=self._local.epoch, rails=1)
        self._say(GreetingKind.WELCOME, welcome)
        self.close("its memory is mapped or unmapped as it asked")

    def _refuse(self, code: Refusal, reason: str) -> None:
        logger.warning("%s refused: %s", self._where, reason)
        self._say(GreetingKind.REFUSE, Refuse(code=code, reason=reason))
        self.close("refused")

    def _say(self, kind: GreetingKind, body: Welcome | Refuse) -> None:
        # A new connection's empty buffer takes it whole.
        self._sock.send(encode_greeting(kind, PROTOCOL_VERSION, encode(body)))
