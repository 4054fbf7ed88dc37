# SPDX-License-Identifier: Apache-2.0
"""Four hosts in network namespaces, on one bridge, and what can happen to the way to each.

The process that makes `Hosts` moves into a namespace of its own, for good, in which the bridge is:
router and clients run there. What a host sends passes a veth pair.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from cpu_serving.namespaces import (
    NoNetwork,
    enter_new_namespace,
    inside,
    need_programs,
    run_tool,
)
from cpu_serving.processes import ServingError

__all__ = ["CENTRE", "Hosts"]

CENTRE = "10.79.0.1"
_BRIDGE = "kv"
#: What a slow way carries. A request's KV is 0.1 to 1 MB.
_SLOW_BITS_PER_S = 20e6
#: A lossy way is fast, but its queue is shorter than what TCP sends at once: packets are dropped
#: whenever the queue is full.
_LOSSY_BITS_PER_S = 100e6
_BURST_BYTES = 16 << 10
_LOSSY_QUEUE_BYTES = 24 << 10
_SLOW_QUEUE_BYTES = 4 << 20


class Hosts:
    """By name. Raises NoNetwork where they cannot be had."""

    def __init__(self, names: tuple[str, ...]) -> None:
        need_programs()
        self._namespaces = {name: enter_new_namespace("scripts/chaos") for name in names}
        self._centre = enter_new_namespace("scripts/chaos")
        try:
            run_tool(("ip", "link", "set", "dev", "lo", "up"))
            run_tool(("ip", "link", "add", "dev", _BRIDGE, "type", "bridge"))
            run_tool(("ip", "address", "add", f"{CENTRE}/24", "dev", _BRIDGE))
            run_tool(("ip", "link", "set", "dev", _BRIDGE, "up"))
            for name in names:
                self._join(name)
                self.slow(name)
                self.mend(name)
        except ServingError as error:
            raise NoNetwork(f"the kernel has no bridge, veth or tbf: {error}") from error

    def address(self, name: str) -> str:
        return f"10.79.0.{11 + list(self._namespaces).index(name)}"

    def on(self, name: str) -> AbstractContextManager[None]:
        """What the calling thread starts is on that host."""
        return inside(self._namespaces[name], self._centre)

    def listening_ports(self, name: str) -> list[int]:
        """TCP ports that can be reached from other hosts."""
        shown = self._host_tool(name, "ss", "-Hltn").splitlines()
        local = [line.split()[3].rpartition(":") for line in shown]
        return sorted({int(port) for host, _, port in local if not host.startswith("127.")})

    def cut(self, name: str) -> None:
        """Nothing passes any more, and nobody is told."""
        run_tool(("ip", "link", "set", "dev", self._port(name), "nomaster"))

    def slow(self, name: str) -> None:
        self._limit(name, _SLOW_BITS_PER_S, _SLOW_QUEUE_BYTES)

    def lossy(self, name: str) -> None:
        self._limit(name, _LOSSY_BITS_PER_S, _LOSSY_QUEUE_BYTES)

    def mend(self, name: str) -> None:
        """Undoes all of these."""
        run_tool(("ip", "link", "set", "dev", self._port(name), "master", _BRIDGE))
        fast = ("pfifo", "limit", "10000")
        self._host_tool(name, "tc", "qdisc", "replace", "dev", _BRIDGE, "root", *fast)

    def _join(self, name: str) -> None:
        here = ("type", "veth", "peer", "name", self._port(name), "netns", str(os.getpid()))
        self._host_tool(name, "ip", "link", "set", "dev", "lo", "up")
        self._host_tool(name, "ip", "link", "add", "dev", _BRIDGE, *here)
        address = f"{self.address(name)}/24"
        self._host_tool(name, "ip", "address", "add", address, "dev", _BRIDGE)
        self._host_tool(name, "ip", "link", "set", "dev", _BRIDGE, "up")
        run_tool(("ip", "link", "set", "dev", self._port(name), "master", _BRIDGE, "up"))

    def _limit(self, name: str, bits_per_s: float, queue_bytes: int) -> None:
        rate, burst = f"{bits_per_s:.0f}bit", str(_BURST_BYTES)
        bucket = ("tbf", "rate", rate, "burst", burst, "limit", str(queue_bytes))
        self._host_tool(name, "tc", "qdisc", "replace", "dev", _BRIDGE, "root", *bucket)

    def _host_tool(self, name: str, *argv: str) -> str:
        return run_tool(argv, self._namespaces[name])

    def _port(self, name: str) -> str:
        return f"to-{name}"
