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
    Shared,
    Welcome,
    decode_body,
    encode,
    version_mismatch,
)
from te.links import samehost
from te.links.admission import HalfOpen
from te.links.dial import tune
from te.links.greeting import Greeting, GreetingKind, GreetingReader, encode_greeting
from te.links.process import Process, peer_pid, peer_process
from te.plane._core import LinkHandle

if TYPE_CHECKING:
    from te.links.accept import Acceptor

__all__ = ["Greeted", "Incoming"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Greeted:
    """A connection that has introduced itself well."""

    sock: socket.socket
    where: str
    hello: Hello
    #: Same host only: who it is, and memory file of the rail.
    process: Process | None
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
        #: Same host only, once its hello is whole.
        self._process: Process | None = None
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
        while self._fds:
            os.close(self._fds.pop())
        if self._process is not None:
            self._process.close()
            self._process = None
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
            self._share(hello, hello.shared)
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
        problem = self._check_process(hello) if self._is_samehost else None
        if problem is None:
            problem = self._acceptor.misfit(hello, self._process)
        if problem is None and hello.is_direct and self._local.fabric is None:
            problem = self._local.fabric_problem
        if problem is not None:
            self._refuse(Refusal.TRANSPORT, problem)
            return
        nonce = None if hello.nonce is None else self._acceptor.nonce
        config = self._local.config
        if not self._is_samehost:
            tune(self._sock, config.stall_timeout_s)
        self._say(
            GreetingKind.WELCOME,
            Welcome(id=self._local.id, epoch=self._local.epoch, rails=config.rails, nonce=nonce),
        )
        self._release()
        rings_fd = self._fds[0] if self._fds else -1
        problem = self._acceptor.greeted(
            Greeted(self._sock, self._where, hello, self._process, rings_fd)
        )
        if problem is None:
            self._fds.clear()
        self.close(problem or "")

    def _check_process(self, hello: Hello) -> str | None:
        """Why the memory of the process behind it is not copied from; None if it may be."""
        process = peer_process(self._sock)
        if isinstance(process, str):
            return process
        self._process = process
        if hello.nonce is None:
            return None  # Then the link that it names has to be of the same process.
        problem = samehost.cannot_read(process, hello.nonce)
        return samehost.READERS.allow(process.pid) if problem is None else problem

    def _make_rail(self, hello: Hello, offer: RailOffer) -> None:
        problem = self._acceptor.begin_rail(hello)
        if problem is None:
            self._later(f"making rail {offer.rail}", lambda: self._acceptor.make_rail(hello, offer))
        else:
            self._refuse(Refusal.TRANSPORT, problem)

    def _share(self, hello: Hello, shared: Shared) -> None:
        link = self._acceptor.begin_shared(hello, peer_pid(self._sock))
        if isinstance(link, str):
            self._refuse(Refusal.TRANSPORT, link)
        elif self._fds:
            try:
                handle, fd = link.handle, self._fds[0]
                handle.add_mapping(shared.serial, shared.address, fd, shared.nbytes)
            except OSError as exc:
                self._refuse(Refusal.TRANSPORT, f"cannot map {shared.nbytes} bytes: {exc.strerror}")
            else:
                self._answer("mapping memory", None)
        else:
            # A copy out of it may have to be waited for.
            self._later("unmapping memory", lambda: _unmap(link.handle, shared.serial))

    def _later(self, what: str, work: Callable[[], RailAnswer | str | None]) -> None:
        """Welcomes it when ``work``, which may block, has done what it asked for, or says why it
        has not."""

        def run() -> None:
            try:
                answer = work()
            except Exception as exc:
                logger.exception("a bug in %s for %s", what, self._where)
                answer = f"a bug of this engine: {exc!r}"
            self._acceptor.loop.call(lambda: self._guard(lambda: self._answer(what, answer)))

        self._acceptor.loop.rewatch(self._fd, 0)  # There is nothing to read before the answer.
        if not self._local.keeper.run(run):
            self.close("this engine was closed")

    def _answer(self, what: str, answer: RailAnswer | str | None) -> None:
        if self._sock.fileno() < 0:
            return  # It took too long.
        if isinstance(answer, str):
            self._refuse(Refusal.TRANSPORT, answer)
            return
        welcome = Welcome(id=self._local.id, epoch=self._local.epoch, rails=1, rail=answer)
        self._say(GreetingKind.WELCOME, welcome)
        self.close(f"it asked for {what}, and that is done")

    def _refuse(self, code: Refusal, reason: str) -> None:
        self._acceptor.log(logging.WARNING, "%s refused: %s", self._where, reason)
        self._say(GreetingKind.REFUSE, Refuse(code=code, reason=reason[:REASON_CHARS_MAX]))
        self.close("refused")

    def _say(self, kind: GreetingKind, body: Welcome | Refuse) -> None:
        # A new connection's empty buffer takes it whole.
        self._sock.send(encode_greeting(kind, PROTOCOL_VERSION, encode(body)))


def _unmap(handle: LinkHandle, serial: int) -> str | None:
    return None if handle.remove_mapping(serial) else "a copy out of it did not end"
