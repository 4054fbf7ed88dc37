# SPDX-License-Identifier: Apache-2.0
"""Where the two sides are, and how the way between them is broken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Protocol

from chaos_run.hosts import BRIDGE, Hosts
from cpu_serving.namespaces import NoNetwork

from healing_run import links
from healing_run.messages import Setup
from healing_run.rows import Fault, Row

__all__ = ["Place", "TcpHosts", "Testbed", "place"]

_DEVICES: Final = Path("/sys/class/infiniband")
#: The testbed's bridge.
_SWITCH: Final = "br0"
#: NICs of a side.
_NICS: Final = 2


class Place(Protocol):
    """rows with two rails are for those who have them."""

    has_rails: bool

    def setup(self, side: str, row: Row, /) -> Setup: ...

    def on(self, side: str, /) -> AbstractContextManager[None]:
        """What is started meanwhile is there."""

    def begin(self, fault: Fault, /) -> None: ...

    def end(self, fault: Fault, /) -> None: ...


class TcpHosts:
    """Two hosts on a bridge. Raises NoNetwork."""

    has_rails = False

    def __init__(self) -> None:
        self._hosts = Hosts(("near", "far"))

    def setup(self, side: str, _row: Row) -> Setup:
        return Setup(self._hosts.address(side), [])

    @contextmanager
    def on(self, side: str) -> Iterator[None]:
        with self._hosts.on(side, sorted(os.sched_getaffinity(0))):
            yield

    def begin(self, fault: Fault) -> None:
        assert fault == "cut", fault
        links.leave(BRIDGE, self._hosts.port("far"))

    def end(self, _fault: Fault) -> None:
        links.join(BRIDGE, self._hosts.port("far"))


class Testbed:
    """Inside scripts/rdma-testbed with four devices: two for each side, wired to one switch."""

    has_rails = True

    def __init__(self) -> None:
        names = sorted(path.name for path in _DEVICES.glob("*"))
        if len(names) < 2 * _NICS:
            raise NoNetwork(
                f"{len(names)} RDMA devices are here, and 4 are needed: scripts/healing --rdma"
                " starts itself in scripts/rdma-testbed"
            )
        self._nics = {"near": names[:_NICS], "far": names[_NICS : 2 * _NICS]}

    def setup(self, side: str, row: Row) -> Setup:
        # Greetings and control frames are not what is cut: they go over the loopback interface.
        return Setup("127.0.0.1", self._nics[side][: row.rails])

    def on(self, _side: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, fault: Fault) -> None:
        number = _number(fault)
        if fault == "cut":
            links.leave(_SWITCH, f"port{number}")
        else:
            links.down(f"veth{number}")

    def end(self, fault: Fault) -> None:
        number = _number(fault)
        if fault == "cut":
            links.join(_SWITCH, f"port{number}")
        else:
            links.up(f"veth{number}")


def _number(fault: Fault) -> int:
    """Of the NIC. One whose port has left the switch has its link still: only silence tells."""
    return 0 if fault == "near NIC" else _NICS


def place(rdma: bool) -> Place:
    """Raises NoNetwork."""
    return Testbed() if rdma else TcpHosts()
