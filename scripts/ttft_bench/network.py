# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a veth pair, and what may leave one of them.

The process that makes a `Network` moves into the first namespace, the near one, for good: decode
server, ordinary server and client run there. The prefill servers run in the far one, whose way out
has a token bucket (tc-tbf(8)). So what is limited is what prefill servers send: KV, words between
the ranks, and a few bytes of HTTP answers. Prompts go the other way, without a limit.

Namespaces and their devices go with the last process in them, so nothing has to be undone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from cpu_serving.processes import ServingError

__all__ = ["FAR", "NEAR", "Network", "NoNetwork"]

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

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetwork(Exception):
    """This machine or user cannot have it; the message says why and what would help."""


class Network:
    """The two namespaces. `close` ends neither: processes in them do."""

    def __init__(self) -> None:
        """Raises NoNetwork."""
        for program in ("ip", "tc", "nsenter"):
            if shutil.which(program) is None:
                raise NoNetwork(f"{program} is missing: apt-get install iproute2 util-linux")
        self._far = self._enter_new()
        os.close(self._enter_new())
        self._near = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
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

    @contextmanager
    def far_side(self) -> Iterator[None]:
        """Sockets that the calling thread makes, and processes that it starts, are in the far
        namespace."""
        _set_namespace(self._far)
        try:
            yield
        finally:
            _set_namespace(self._near)

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

    def _enter_new(self) -> int:
        if _libc.unshare(_CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise NoNetwork(
                f"no network namespace can be made here ({reason}): run it as root, or as"
                " unshare --user --map-root-user --net scripts/ttft"
            )
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY)

    def _far_tool(self, *argv: str) -> str:
        return self._tool("nsenter", f"--net=/proc/{os.getpid()}/fd/{self._far}", *argv)

    def _tool(self, *argv: str) -> str:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServingError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout


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


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
