# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a veth pair, and what may leave one of them.

The process that makes a `Network` moves into the first namespace, the near one, for good: decode
server, ordinary server and client run there. The prefill servers run in the far one, whose way out
has a token bucket (tc-tbf(8)). So what is limited is what prefill servers send: KV, words between
the ranks, and a few bytes of HTTP answers. Prompts go the other way, without a limit.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import AbstractContextManager, closing

from cpu_serving.namespaces import (
    NoNetwork,
    enter_new_namespace,
    inside,
    need_programs,
    run_tool,
)
from cpu_serving.processes import ServingError

__all__ = ["FAR", "NEAR", "Network"]

NEAR = "10.78.0.1"
FAR = "10.78.0.2"
DEVICE = "kv"
# The kernel hands packets of up to 64 KiB to a veth device and cuts them up behind the bucket: it
# has to hold a few, and what flows while a timer is late: 50 us of 40 Gbit/s are as much.
BURST_BYTES = 256 << 10
# More than TCP has in flight towards a queue (TCP small queues), so that nothing is dropped.
QUEUE_BYTES = 16 << 20
PROBE_S = 0.5
PROBE_BYTES = (2 << 20, 256 << 20)
PROBE_TIMEOUT_S = 60.0
RECEIVE_BYTES = 1 << 20


class Network:
    """The two namespaces. `close` ends neither: processes in them do."""

    def __init__(self) -> None:
        """Raises NoNetwork."""
        need_programs()
        self._far = enter_new_namespace("scripts/ttft")
        self._near = enter_new_namespace("scripts/ttft")
        pid = os.getpid()
        try:
            self._tool("ip", "link", "set", "dev", "lo", "up")
            self._far_tool("ip", "link", "set", "dev", "lo", "up")
            peer = ("type", "veth", "peer", "name", DEVICE, "netns", str(pid))
            self._far_tool("ip", "link", "add", "dev", DEVICE, *peer)
            for tool, address in ((self._tool, NEAR), (self._far_tool, FAR)):
                tool("ip", "address", "add", f"{address}/24", "dev", DEVICE)
                tool("ip", "link", "set", "dev", DEVICE, "up")
            self.limit(1e9)
            self.limit(None)
        except ServingError as error:
            raise NoNetwork(f"the kernel has no veth or no token bucket (tbf): {error}") from error

    def far_side(self) -> AbstractContextManager[None]:
        """Sockets that the calling thread makes, and processes that it starts, are in the far
        namespace."""
        return inside(self._far, self._near)

    def limit(self, bits_per_s: float | None) -> None:
        """Let the far side send so much, headers included; None for as much as it can."""
        self._far_tool("tc", "qdisc", "replace", "dev", DEVICE, "root", *_discipline(bits_per_s))

    def dropped_packets(self) -> int:
        """By the far side's queue, since the last `limit`. A queue that drops is too short."""
        shown = self._far_tool("tc", "-s", "qdisc", "show", "dev", DEVICE)
        return int(shown.partition("dropped ")[2].partition(",")[0] or 0)

    def measured_bytes_per_s(self, bits_per_s: float | None) -> float:
        """What a plain TCP connection carries to the near side, payload alone."""
        least, most = PROBE_BYTES
        nbytes = most if bits_per_s is None else int(bits_per_s / 8 * PROBE_S)
        nbytes = min(max(nbytes, least), most)
        with socket.create_server((NEAR, 0)) as listening:
            listening.settimeout(PROBE_TIMEOUT_S)
            address = listening.getsockname()
            sender = threading.Thread(target=self._send, args=(address, nbytes), daemon=True)
            sender.start()
            connection, _ = listening.accept()
            with closing(connection):
                rate = _receive(connection)
            sender.join()
        return rate

    def _send(self, address: tuple[str, int], nbytes: int) -> None:
        with self.far_side(), socket.create_connection(address, PROBE_TIMEOUT_S) as connection:
            # The first bytes find a full bucket, and are not counted.
            connection.sendall(bytes(2 * BURST_BYTES + nbytes))

    def _tool(self, *argv: str) -> str:
        return run_tool(argv)

    def _far_tool(self, *argv: str) -> str:
        return run_tool(argv, self._far)


def _discipline(bits_per_s: float | None) -> tuple[str, ...]:
    if bits_per_s is None:
        return ("pfifo", "limit", "10000")
    rate = f"{bits_per_s:.0f}bit"
    return ("tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES))


def _receive(connection: socket.socket) -> float:
    """Bytes per second of all that comes behind a full bucket."""
    connection.settimeout(PROBE_TIMEOUT_S)
    buffer = bytearray(RECEIVE_BYTES)
    got = first = 0
    began_s = 0.0
    while count := connection.recv_into(buffer):
        got += count
        if not first and got >= 2 * BURST_BYTES:
            first, began_s = got, time.monotonic()
    return (got - first) / (time.monotonic() - began_s)
