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
"""Engines, beside those that are being connected. For one more, the connection is closed that was
not used for longest."""


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
    except ConnectionResetError as exc:  # As by Mooncake's engine, which knows no such question.
        raise NoCard(
            f"session {session}: it hung up on the question for its card: both sides need"
            " sglang-mooncake's mooncake.engine, or both Mooncake's"
        ) from exc
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
        mine = _Attempt()
        try:
            found = self._join(session, mine)
            if not isinstance(found, _Attempt):
                return found
            if found is mine:
                mine.peer = self._engine.connect(self.ask(session).card)
                return mine.peer
        except BaseException as exc:
            mine.problem = str(exc) or repr(exc)
            raise
        finally:
            self._end(session, mine)
        if not found.ended.wait(CONNECT_TIMEOUT_S):
            raise NoCard(f"session {session}: not connected within {CONNECT_TIMEOUT_S} s")
        if found.peer is None:
            raise NoCard(f"another call has just tried: {found.problem}")
        return found.peer

    def _join(self, session: str, mine: _Attempt) -> te.Peer | _Attempt:
        """The engine if it is connected, else the attempt to connect: the caller's own, if no other
        one is under way."""
        with self._lock:
            one = self._known.setdefault(session, _Session())
            self._known.move_to_end(session)
            if one.peer is not None and one.peer.alive:
                found: te.Peer | _Attempt = one.peer
            else:
                found = one.attempt = one.attempt or mine
            gone = self._pushed_out(session)
        for peer in gone:
            peer.close()
        return found

    def _pushed_out(self, by: str) -> list[te.Peer]:
        """Of too many those not used for longest, but none that is being connected: nobody would
        have its connection in the end."""
        too_many = len(self._known) - self._most
        if too_many <= 0:
            return []
        idle = [name for name, one in self._known.items() if one.attempt is None and name != by]
        peers = [self._known.pop(name).peer for name in idle[:too_many]]
        return [one for one in peers if one is not None]

    def _end(self, session: str, mine: _Attempt) -> None:
        """Of the caller's own attempt, if others may wait for it."""
        with self._lock:
            one = self._known.get(session)
            if one is None or one.attempt is not mine:
                return
            one.peer, one.attempt = mine.peer, None
        mine.ended.set()
