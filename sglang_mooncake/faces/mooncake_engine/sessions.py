# SPDX-License-Identifier: Apache-2.0
"""The engines that this process transfers to and from, by the names that Mooncake gives them."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import te
from sglang_mooncake.faces.mooncake_engine.exchange import (
    ANSWER_HEAD_BYTES,
    NONCE_BYTES,
    NoCard,
    Told,
    answer_nbytes,
    place_of,
    question,
    read_answer,
)

__all__ = ["Sessions", "ask", "host_and_port"]

ASK_TIMEOUT_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 60.0
"""For somebody else's attempt to connect, which has time-outs of its own that are shorter."""
SESSIONS_MAX: Final = 1024
"""Connected engines. For one more, the connection is closed that was not used for longest."""


def host_and_port(session: str) -> tuple[str, int]:
    """Of ``host:port``, ``[IPv6]:port``. ``ValueError`` for anything else."""
    host, colon, port = session.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"the session {session!r} is not a host and a port, as in 10.0.0.1:15000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def ask(session: str, keys: Sequence[bytes], timeout_s: float) -> Told:
    """What the engine of a session tells of itself. ``NoCard`` if it does not, ``ValueError`` if
    the session is not of the form."""
    address = host_and_port(session)
    deadline_s = time.monotonic() + timeout_s
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        with socket.create_connection(address, timeout_s) as connection:
            whom = place_of(connection.getpeername())
            connection.sendall(question(nonce, keys, whom))
            head = _exactly(connection, ANSWER_HEAD_BYTES, deadline_s)
            rest = _exactly(connection, answer_nbytes(head), deadline_s)
            return read_answer(head, rest, nonce, keys, whom)
    except OSError as exc:
        raise NoCard(f"session {session}: no answer within {timeout_s} s: {exc}") from exc
    except NoCard as exc:
        raise NoCard(f"session {session}: {exc}") from exc


def _exactly(connection: socket.socket, nbytes: int, deadline_s: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        connection.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        more = connection.recv(nbytes - len(data))
        if not more:
            raise NoCard(f"it closed the connection after {len(data)} of {nbytes} bytes")
        data += more
    return bytes(data)


@dataclass(eq=False)
class _Attempt:
    """To connect, by one caller for all that want the same engine meanwhile."""

    ended: threading.Event = field(default_factory=threading.Event)
    peer: te.Peer | None = None
    problem: str = ""


@dataclass(eq=False)
class _Session:
    peer: te.Peer | None = None
    attempt: _Attempt | None = None


class Sessions:
    """Any thread may call anything."""

    def __init__(self, engine: te.Engine, keys: Sequence[bytes], most: int = SESSIONS_MAX) -> None:
        self._engine, self._keys, self._most = engine, keys, most
        self._lock = threading.Lock()
        #: The one used last is the last one.
        self._known: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def ask(self, session: str) -> Told:
        """What its engine tells now; see `ask`."""
        return ask(session, self._keys, ASK_TIMEOUT_S)

    def peer(self, session: str) -> te.Peer:
        """The engine of a session, connected. One that was restarted is asked again.

        Raises:
            NoCard: it cannot be asked.
            te.Error: it cannot be connected to.
            ValueError: the session is not a host and a port.
        """
        host_and_port(session)
        found, is_mine = self._join(session)
        if not isinstance(found, _Attempt):
            return found
        if is_mine:
            return self._connect(session, found)
        if not found.ended.wait(CONNECT_TIMEOUT_S):
            raise NoCard(f"session {session}: not connected within {CONNECT_TIMEOUT_S} s")
        if found.peer is None:
            raise NoCard(f"another call has just tried: {found.problem}")
        return found.peer

    def _connect(self, session: str, attempt: _Attempt) -> te.Peer:
        try:
            attempt.peer = self._engine.connect(self.ask(session).card)
            return attempt.peer
        except BaseException as exc:
            attempt.problem = str(exc) or repr(exc)
            raise
        finally:
            with self._lock:
                one = self._known.get(session)
                if one is not None and one.attempt is attempt:
                    one.peer, one.attempt = attempt.peer, None
            attempt.ended.set()

    def _join(self, session: str) -> tuple[te.Peer | _Attempt, bool]:
        """The engine if it is connected, else an attempt to connect, and whether the caller is to
        make it."""
        with self._lock:
            one = self._known.setdefault(session, _Session())
            self._known.move_to_end(session)
            is_full = len(self._known) > self._most
            gone = self._known.popitem(last=False)[1].peer if is_full else None
            is_connected = one.peer is not None and one.peer.alive
            found, is_mine = one.peer if is_connected else one.attempt, False
            if found is None:
                found = one.attempt = _Attempt()
                is_mine = True
        if gone is not None:
            gone.close()
        return found, is_mine
