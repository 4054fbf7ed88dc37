# SPDX-License-Identifier: Apache-2.0
"""Connects sockets to servers. A name is looked up once for all who want it at the same time, and
again after some seconds: few of uvloop's threads look names up, and a burst of requests makes
hundreds of connections."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any, Final, NamedTuple

from aiohappyeyeballs import start_connection

__all__ = ["ADDRESSES_S", "EXHAUSTED", "GONE_S", "NEXT_ADDRESS_S", "Dialer"]

#: So long the addresses of a name hold. A name of Kubernetes may move to another pod.
ADDRESSES_S: Final = 10.0
#: A host that vanishes says nothing. One that has acknowledged nothing for about so long is gone:
#: neither what was sent there, nor one of the probes that are sent when nothing else is.
GONE_S: Final = 20
PROBE_S: Final = 5
#: After so long without an answer the next address of the name is tried beside (RFC 8305).
NEXT_ADDRESS_S: Final = 0.25

#: This process, or its host, has no descriptor or no memory left (socket(2)): no server's fault.
EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Addresses = list[tuple[Any, Any, int, str, Any]]
"""As ``getaddrinfo`` returns them."""


#: tcp(7).
_OPTIONS: Final = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: PROBE_S,
    socket.TCP_KEEPINTVL: PROBE_S,
    socket.TCP_KEEPCNT: GONE_S // PROBE_S - 1,
    socket.TCP_USER_TIMEOUT: GONE_S * 1000,
}


class _Lookup(NamedTuple):
    since_s: float
    task: asyncio.Task[Addresses]


class Dialer:
    """Connects to hosts by their names or addresses. For one event loop."""

    def __init__(self) -> None:
        self._lookups: dict[tuple[str, int], _Lookup] = {}

    async def connect(self, host: str, port: int) -> socket.socket:
        """A connected socket. ``OSError``; the caller looks at the time."""
        addresses = await self._addresses(host, port)
        connected = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_S)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        return connected

    async def _addresses(self, host: str, port: int) -> Addresses:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for key, one in list(self._lookups.items()):
            if one.task.done() and (_failed(one.task) or now_s - one.since_s > ADDRESSES_S):
                del self._lookups[key]
        known = self._lookups.get((host, port))
        if known is None:
            task = asyncio.ensure_future(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            task.add_done_callback(_failed)  # Also where nobody waits for it any more.
            known = self._lookups[host, port] = _Lookup(now_s, task)
        return await asyncio.shield(known.task)


def _failed(lookup: asyncio.Task[Addresses]) -> bool:
    return lookup.cancelled() or lookup.exception() is not None
