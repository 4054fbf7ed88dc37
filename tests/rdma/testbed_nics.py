# SPDX-License-Identifier: Apache-2.0
"""The testbed from inside: its devices, what they counted, and how to cut and slow their links."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Nic", "cut", "end_connections", "nics", "run", "shaped", "wait_for"]

DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Nic:
    """One device of ``scripts/rdma-testbed``."""

    index: int
    #: ``rxe0`` or ``siw0``.
    device: str

    @property
    def driver(self) -> str:
        return self.device.rstrip("0123456789")

    @property
    def address(self) -> str:
        return f"10.77.0.{self.index + 1}"

    @property
    def netdev(self) -> str:
        """Its network interface; what goes down with it is its own link."""
        return f"veth{self.index}"

    @property
    def port(self) -> str:
        """The other end of its cable, at the switch."""
        return f"port{self.index}"

    def state(self) -> str:
        """``ACTIVE`` or ``DOWN`` or another, as the device tells."""
        return (DEVICES / self.device / "ports/1/state").read_text().split()[-1]

    def hardware_counter(self, name: str) -> int:
        """One of ``ports/1/hw_counters``; rxe has them, siw has none."""
        return int((DEVICES / self.device / "ports/1/hw_counters" / name).read_text())

    def wire_bytes(self, direction: str) -> int:
        """Bytes that went over its network interface, ``tx`` or ``rx``."""
        path = Path("/sys/class/net") / self.netdev / "statistics" / f"{direction}_bytes"
        return int(path.read_text())


def nics() -> tuple[Nic, ...]:
    """All of the testbed's, in order."""
    names = sorted(path.name for path in DEVICES.glob("*"))
    return tuple(Nic(i, name) for i, name in enumerate(names))


def run(*command: str) -> str:
    """Its output; an assertion with it when the command fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def cut(interface: str) -> Iterator[None]:
    """The interface is down for as long as this lasts."""
    run("ip", "link", "set", interface, "down")
    try:
        yield
    finally:
        run("ip", "link", "set", interface, "up")


@contextmanager
def shaped(interface: str, *discipline: str) -> Iterator[None]:
    """What leaves the interface passes a queueing discipline: ``netem loss 10%``, ``tbf …``."""
    run("tc", "qdisc", "add", "dev", interface, "root", *discipline)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", interface, "root")


def end_connections(nics: tuple[Nic, ...]) -> int:
    """Ends every TCP connection of this process that leaves from one of these devices' addresses;
    how many there were. Both ends know it at once if they are in this process, whatever the wires
    carry."""
    addresses, ended = {nic.address for nic in nics}, 0
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, or connected with nobody
            if path.is_socket():
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    is_tcp = (one.family, one.type) == (socket.AF_INET, socket.SOCK_STREAM)
                    if is_tcp and one.getsockname()[0] in addresses and one.getpeername():
                        one.shutdown(socket.SHUT_RDWR)
                        ended += 1
    return ended


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Returns as soon as the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.005)
