# SPDX-License-Identifier: Apache-2.0
"""Hosts in network namespaces, on one bridge, and what can happen to the way to each.

The process that makes `Hosts` moves into a namespace of its own, for good, in which the bridge is:
router and clients run there. What a host sends passes a veth pair.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cpu_serving.namespaces import (
    NoNetwork,
    enter_new_namespace,
    inside,
    need_programs,
    run_tool,
)
from cpu_serving.processes import ServingError

from chaos_run.control_filter import narrow, vanishing
from chaos_run.ending import with_host, with_others

__all__ = ["BRIDGE", "CENTRE", "Hosts"]

CENTRE = "10.79.0.1"
_NETWORK = "10.79.0.0/24"
BRIDGE = "kv"
#: What a slow way carries. A request's KV is 0.1 to 1 MB.
_SLOW_BITS_PER_S = 20e6
#: A lossy way is fast, but its queue is shorter than what TCP sends at once: packets are dropped
#: whenever the queue is full.
_LOSSY_BITS_PER_S = 100e6
_BURST_BYTES = 16 << 10
_LOSSY_QUEUE_BYTES = 24 << 10
_SLOW_QUEUE_BYTES = 4 << 20
#: Of packets of control links, the share that vanishes on a way where some do. TCP sends again.
_CONTROL_LOSS = 0.4
#: What a narrow way carries of control messages: one for a request has 1 to 2 kB.
_NARROW_BITS_PER_S = 16e3
_PLAIN = ("pfifo", "limit", "10000")
#: Of the table of routes that a forwarded port has.
_TABLE = "100"
_CENTRE_NAME = "centre"


class Hosts:
    """By name. Raises NoNetwork where they cannot be had."""

    def __init__(self, names: tuple[str, ...]) -> None:
        need_programs()
        self._namespaces = {name: enter_new_namespace("scripts/chaos") for name in names}
        self._centre = enter_new_namespace("scripts/chaos")
        try:
            run_tool(("ip", "link", "set", "dev", "lo", "up"))
            run_tool(("ip", "link", "add", "dev", BRIDGE, "type", "bridge"))
            run_tool(("ip", "address", "add", f"{CENTRE}/24", "dev", BRIDGE))
            run_tool(("ip", "link", "set", "dev", BRIDGE, "up"))
            for name in names:
                self._join(name)
                for disturb in (self.slow, lambda one: self.control_lossy(one, [1])):
                    disturb(name)
                    self.mend(name)
            self._try_to_end_connections()
        except ServingError as error:
            raise NoNetwork(f"the kernel lacks something of this: {error}") from error

    def address(self, name: str) -> str:
        return f"10.79.0.{11 + self._index(name)}"

    @contextmanager
    def on(self, name: str, cores: Sequence[int]) -> Iterator[None]:
        """What the calling thread starts is on that host, and on these of the machine's cores."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            with inside(self._namespaces[name], self._centre):
                yield
        finally:
            os.sched_setaffinity(0, before)

    def listening_ports(self, name: str) -> list[int]:
        """TCP ports that can be reached from other hosts."""
        shown = self._host_tool(name, "ss", "-Hltn").splitlines()
        local = [line.split()[3].rpartition(":") for line in shown]
        return sorted({int(port) for host, _, port in local if not host.startswith("127.")})

    def cut(self, name: str) -> None:
        """Nothing passes any more, and nobody is told."""
        run_tool(("ip", "link", "set", "dev", self.port(name), "nomaster"))

    def sever(self, name: str) -> None:
        """The same, and every TCP connection with another host is ended, at both ends: all know of
        it at once, and what they dial from then on is not answered.

        A registry that is forwarded from this host to another (`forward`) loses its connections,
        too, as they are to an address of this one."""
        self.cut(name)
        addresses = (self.address(name), self._second_address(name))
        self._end_connections(name, with_others(_NETWORK, addresses))
        for other in (*self._namespaces, _CENTRE_NAME):
            if other != name:
                self._end_connections(other, with_host(addresses))

    def slow(self, name: str) -> None:
        self._limit(name, _SLOW_BITS_PER_S, _SLOW_QUEUE_BYTES)

    def lossy(self, name: str) -> None:
        self._limit(name, _LOSSY_BITS_PER_S, _LOSSY_QUEUE_BYTES)

    def control_cut(self, name: str, ports: Sequence[int]) -> None:
        """Packets from and to these TCP ports vanish, on their way to the host and back."""
        self._filter(name, lambda device: vanishing(device, ports, 1.0))

    def control_lossy(self, name: str, ports: Sequence[int]) -> None:
        """Some do."""
        self._filter(name, lambda device: vanishing(device, ports, _CONTROL_LOSS))

    def control_narrow(self, name: str, ports: Sequence[int]) -> None:
        """They wait for each other, and senders for them."""
        self._filter(name, lambda device: narrow(device, ports, _NARROW_BITS_PER_S))

    def mend(self, name: str) -> None:
        """Undoes all of these."""
        run_tool(("ip", "link", "set", "dev", self.port(name), "master", BRIDGE))
        self._host_tool(name, "tc", "qdisc", "replace", "dev", BRIDGE, "root", *_PLAIN)
        run_tool(("tc", "qdisc", "replace", "dev", self.port(name), "root", *_PLAIN))

    def forward(self, owner: str, port: int, to: str) -> None:
        """From now on a TCP port of the host `owner` is served by the host `to`, also for `owner`
        itself; as a load balancer would have it, by routes alone.

        What `owner` asks there it asks from another address of its own, as `to` has taken its
        usual one for the answers."""
        address, second = self.address(owner), self._second_address(owner)
        self._host_tool(to, "sysctl", "-q", "-w", "net.ipv4.conf.all.arp_ignore=1")
        self._host_tool(to, "ip", "address", "add", f"{address}/32", "dev", "lo")
        self._host_tool(owner, "ip", "address", "add", f"{second}/24", "dev", BRIDGE)
        # The table of a host's own addresses comes first, unless it is moved.
        self._host_tool(owner, "ip", "rule", "add", "pref", "10", "lookup", "local")
        self._host_tool(owner, "ip", "rule", "del", "pref", "0")
        from_owner = ("src", second)
        for name in (*self._namespaces, _CENTRE_NAME):
            if name != to:
                rule = ("to", address, "ipproto", "tcp", "dport", str(port), "lookup", _TABLE)
                self._host_tool(name, "ip", "rule", "add", "pref", "5", *rule)
                route = ("default", "via", self.address(to), "dev", BRIDGE, "table", _TABLE)
                source = from_owner if name == owner else ()
                self._host_tool(name, "ip", "route", "add", *route, *source)

    def _join(self, name: str) -> None:
        here = ("type", "veth", "peer", "name", self.port(name), "netns", str(os.getpid()))
        self._host_tool(name, "ip", "link", "set", "dev", "lo", "up")
        self._host_tool(name, "ip", "link", "add", "dev", BRIDGE, *here)
        address = f"{self.address(name)}/24"
        self._host_tool(name, "ip", "address", "add", address, "dev", BRIDGE)
        self._host_tool(name, "ip", "link", "set", "dev", BRIDGE, "up")
        run_tool(("ip", "link", "set", "dev", self.port(name), "master", BRIDGE, "up"))

    def _try_to_end_connections(self) -> None:
        """Raises ServingError if this kernel cannot: ss says nothing then."""
        with (
            socket.create_server((CENTRE, 0)) as server,
            socket.create_connection(server.getsockname()),
        ):
            which = with_host([CENTRE])
            self._end_connections(_CENTRE_NAME, which)
            if self._host_tool(_CENTRE_NAME, "ss", "-Htn", "state", "established", *which):
                raise ServingError("ss -K ends no connection without CONFIG_INET_DIAG_DESTROY")

    def _end_connections(self, name: str, which: tuple[str, ...]) -> None:
        """Those of one host that ss's filter chooses."""
        self._host_tool(name, "ss", "-HtnK", "state", "connected", *which)

    def _limit(self, name: str, bits_per_s: float, queue_bytes: int) -> None:
        rate, burst = f"{bits_per_s:.0f}bit", str(_BURST_BYTES)
        bucket = ("tbf", "rate", rate, "burst", burst, "limit", str(queue_bytes))
        self._host_tool(name, "tc", "qdisc", "replace", "dev", BRIDGE, "root", *bucket)

    def _filter(self, name: str, commands: Callable[[str], Iterator[tuple[str, ...]]]) -> None:
        for command in commands(BRIDGE):
            self._host_tool(name, *command)
        for command in commands(self.port(name)):
            run_tool(command)

    def _host_tool(self, name: str, *argv: str) -> str:
        namespace = self._centre if name == _CENTRE_NAME else self._namespaces[name]
        return run_tool(argv, namespace)

    def _index(self, name: str) -> int:
        return list(self._namespaces).index(name)

    def _second_address(self, name: str) -> str:
        """Of a host of which a port is forwarded."""
        return f"10.79.0.{31 + self._index(name)}"

    def port(self, name: str) -> str:
        """The bridge's end of the wire to that host."""
        return f"to-{name}"
