# SPDX-License-Identifier: Apache-2.0
"""One incoming connection, until its hello is answered."""

from __future__ import annotations

import logging
import os
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te.errors import HandshakeError, ProtocolViolation
from te.handshake import (
    PROTOCOL_VERSION,
    REASON_CHARS_MAX,
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
from te.links.admission import HalfOpen
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
    """Belongs to the acceptor's thread. Whatever goes wrong costs this connection and no other."""

    def __init__(
        self,
        acceptor: Acceptor,
        sock: socket.socket,
        where: str,
        is_samehost: bool,
        half_open: HalfOpen,
    ) -> None:
        self._acceptor = acceptor
        self._local = acceptor.local
        self._sock = sock
        self._fd = sock.fileno()
        self._where = where
        self._is_samehost = is_samehost
        self._half_open = half_open
        self._reader = GreetingReader()
        #: The descriptor that came with the hello, if any.
        self._fds: list[int] = []
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
            self.close("a bug of this engine")

    def _release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._acceptor.introduced(self._half_open)
            self._acceptor.forget(self)
            self._acceptor.loop.forget(self._fd)
        while self._fds:
            os.close(self._fds.pop())

    def _take(self) -> None:
        greeting = self._read()
        if greeting is not None:
            self._acceptor.introduced(self._half_open)
            self._greet(greeting)

    def _read(self) -> Greeting | None:
        room = self._reader.room()
        if self._is_samehost:
            data, fds, flags, _ = socket.recv_fds(self._sock, len(room), 1, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
            if len(self._fds) > 1 or flags & socket.MSG_CTRUNC:
                raise ProtocolViolation("a hello with more than one descriptor")
            room[: len(data)] = data
            nbytes = len(data)
        else:
            nbytes = self._sock.recv_into(room)
        if not nbytes:
            raise ConnectionResetError("closed by the peer")
        self._half_open.has_spoken = True
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
        elif self._is_samehost and (hello.is_direct or hello.rail is not None):
            raise ProtocolViolation("a link over RDMA through the socket for the same host")
        elif not self._is_samehost and (hello.nonce is not None or hello.shared is not None):
            raise ProtocolViolation("a hello about memory of this host over TCP")
        elif hello.shared is not None:
            self._map(hello)
        elif hello.rail is not None:
            self._make_rail(hello, hello.rail)
        else:
            self._welcome(hello)

    def _welcome(self, hello: Hello) -> None:
        if self._is_samehost and not self._fds:
            raise ProtocolViolation("a rail on the same host without memory for its rings")
        limit = self._acceptor.limit()
        if limit is not None:
            self._refuse(Refusal.LIMIT, limit)
            return
        problem = self._acceptor.misfit(hello, self._is_samehost)
        if problem is None and hello.is_direct and self._local.fabric is None:
            problem = self._local.fabric_problem
        nonce = None
        if problem is None and self._is_samehost and hello.nonce is not None:
            problem = samehost.cannot_read(samehost.peer_pid(self._sock), hello.nonce)
            nonce = self._acceptor.nonce
        if problem is not None:
            self._refuse(Refusal.TRANSPORT, problem)
            return
        config = self._local.config
        if not self._is_samehost:
            tune(self._sock, config.stall_timeout_s)
        self._say(
            GreetingKind.WELCOME,
            Welcome(id=self._local.id, epoch=self._local.epoch, rails=config.rails, nonce=nonce),
        )
        rings_fds, self._fds = self._fds, []
        self._release()
        self._fds = rings_fds
        rings_fd = rings_fds[0] if rings_fds else -1
        problem = self._acceptor.greeted(
            Greeted(self._sock, self._where, self._is_samehost, hello, rings_fd)
        )
        if problem is None:
            self._fds.clear()
        else:
            self.close(problem)

    def _make_rail(self, hello: Hello, offer: RailOffer) -> None:
        problem = self._acceptor.begin_rail(hello)
        if problem is not None:
            self._refuse(Refusal.TRANSPORT, problem)
            return

        def make() -> None:
            try:
                answer = self._acceptor.make_rail(hello, offer)
            except Exception as exc:
                logger.exception("a bug in making rail %d for %s", offer.rail, self._where)
                answer = f"a bug of this engine: {exc!r}"
            self._acceptor.loop.call(lambda: self._guard(lambda: self._answer_rail(answer)))

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
        self._acceptor.log(logging.WARNING, "%s refused: %s", self._where, reason)
        self._say(GreetingKind.REFUSE, Refuse(code=code, reason=reason[:REASON_CHARS_MAX]))
        self.close("refused")

    def _say(self, kind: GreetingKind, body: Welcome | Refuse) -> None:
        # A new connection's empty buffer takes it whole.
        self._sock.send(encode_greeting(kind, PROTOCOL_VERSION, encode(body)))
