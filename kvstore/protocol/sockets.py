# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ sockets between owners: encrypted, for holders of the deployment's secret alone (CURVE,
RFC 26); without keys, in plain."""

from __future__ import annotations

import errno
import hmac
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from bootstrap_server.admission.routing_ids import ignore_claimed_ids
from kvstore.rate_limited_log import RateLimitedLog

__all__ = ["MESSAGE_BYTES_MAX", "Sockets", "Where"]

logger = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 8 << 20
HANDSHAKE_MS_MAX: Final = 5000
"""A connection that has not proved its key for so long is closed."""
DIAL_MS: Final = 900
"""An owner that does not answer is dialled anew after so long. TCP asks again after 1, 3 and 7 s:
one that was cut off would be found up to 4 s after it is back."""
BACKLOG: Final = 1024
SOCKETS_MAX: Final = 16 << 10
"""Two and more for each owner; libzmq's own limit is 1,023. File descriptors are what limits."""
_DOMAIN: Final = "kvstore"
_OWNER, _CLIENT = b"kvstore owner", b"kvstore client"


class Where(NamedTuple):
    """Where an owner listens."""

    endpoint: str
    #: The deployment's key that the owner proves; empty: none, and nothing is encrypted.
    key: bytes = b""


class Sockets:
    """Opens the sockets of one process. Any thread may call anything; a socket is for one."""

    def __init__(self, keys: Sequence[bytes] = (), ports: Sequence[int] = ()) -> None:
        """
        Args:
            keys: whoever proves one of them is let in, and the first is proved to clients; without,
                sockets are in plain and let everybody in who can reach them.
            ports: those to listen at, where an endpoint leaves it open; without, any free one.
        """
        self._ports = ports
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
        self._keys = tuple(keys)
        self._gate: ThreadAuthenticator | None = None

    def listen(self, endpoint: str) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER socket, and the endpoint with the port that was chosen. A message to a peer has
        one frame. ``zmq.ZMQError`` if the endpoint cannot be bound; ``OSError`` if none of the
        ports is free."""
        socket = self._socket(zmq.ROUTER, endpoint)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS_MAX)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if self._keys:
            self._guard()
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, _secret(self._keys[0], _OWNER))
            socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # Nobody comes in without the gate.
        try:
            self._bind(socket, endpoint)
        except (zmq.ZMQError, OSError):
            socket.close()
            raise
        ignore_claimed_ids(socket)
        return socket, bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        base = endpoint.removesuffix(":*")
        if base == endpoint or not self._ports:
            socket.bind(endpoint)
            return
        for port in self._ports:
            try:
                socket.bind(f"{base}:{port}")
            except zmq.ZMQError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
            else:
                return
        raise OSError(
            errno.EADDRINUSE,
            f"none of the ports from {self._ports[0]} to {self._ports[-1]} is free; give a wider"
            " range: an owner listens at two",
        )

    def connect(self, where: Where) -> zmq.Socket[bytes]:
        """A DEALER socket. ``zmq.ZMQError`` if there are too many, or after ``close``."""
        socket = self._socket(zmq.DEALER, where.endpoint)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, DIAL_MS)
        try:
            if where.key:
                mine = _secret(where.key, _CLIENT)
                socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_secret(where.key, _OWNER)))
                socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(mine))
                socket.setsockopt(zmq.CURVE_SECRETKEY, mine)
            socket.connect(where.endpoint)
        except BaseException:
            socket.close()
            raise
        return socket

    def connect_watched(self, where: Where) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """As ``connect``; and a socket that can be read once the connection has ended. libzmq makes
        another one and tells nobody; what was on its way is lost."""
        socket = self.connect(where)
        try:
            return socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except BaseException:
            socket.close()
            raise

    def close(self) -> None:
        """Ends all sockets that are left."""
        if self._gate is not None:
            self._gate.stop()
            self._gate = None
        self._context.destroy(linger=0)

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        return socket

    def _guard(self) -> None:
        """libzmq asks it about each connection."""
        if self._gate is None:
            allowed = {zmq.curve_public(_secret(key, _CLIENT)) for key in self._keys}
            self._gate = ThreadAuthenticator(self._context)
            self._gate.start()
            self._gate.configure_curve_callback(_DOMAIN, _Holders(allowed))


class _Holders:
    """Those who have the secret."""

    def __init__(self, allowed: set[bytes]) -> None:
        self._allowed = allowed
        self._refused = RateLimitedLog(logger)

    def callback(self, _domain: str, key: bytes) -> bool:
        """For ``zmq.auth``; ``key`` in Z85."""
        if key in self._allowed:
            return True
        self._refused.warn(
            "a connection to the store was refused: its secret differs; give all processes of the"
            " store the same secret file"
        )
        return False


def _secret(key: bytes, label: bytes) -> bytes:
    """The secret key of a role, in Z85."""
    return z85.encode(hmac.digest(key, label, "sha256"))
