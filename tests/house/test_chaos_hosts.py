# SPDX-License-Identifier: Apache-2.0
"""Hosts of scripts/chaos: what ends when one of them is severed, and what does not."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from chaos_run.hosts import Hosts
from cpu_serving.namespaces import inside

pytestmark = pytest.mark.slow

VICTIM, OTHER, REGISTRY = "victim", "other", "registry"
PORT = 8998
#: Long enough to dial on a busy machine, and what nobody answers.
DIALS_S, UNANSWERED_S = 60.0, 0.5
LOOPBACK = "127.0.0.1"

Ends = tuple[socket.socket, socket.socket]


@contextmanager
def at_the_centre() -> Iterator[Hosts]:
    """This thread is there meanwhile."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        with inside(here, otherwise=here):
            yield Hosts((VICTIM, OTHER, REGISTRY))
    finally:
        os.close(here)


class Connections:
    """TCP between hosts. All are closed in the end."""

    def __init__(self, hosts: Hosts, undo: ExitStack) -> None:
        self._hosts, self._undo = hosts, undo

    def listen(self, host: str, address: str, port: int = 0) -> socket.socket:
        with self._hosts.on(host, sorted(os.sched_getaffinity(0))):
            return self._undo.enter_context(socket.create_server((address, port)))

    def dial(self, host: str, server: socket.socket, timeout_s: float) -> socket.socket:
        with self._hosts.on(host, sorted(os.sched_getaffinity(0))):
            made = socket.create_connection(server.getsockname(), timeout_s)
        return self._undo.enter_context(made)

    def make(self, source: str, server: socket.socket) -> Ends:
        near = self.dial(source, server, DIALS_S)
        server.settimeout(DIALS_S)
        far, _ = server.accept()
        self._undo.enter_context(far)
        return near, far


def ended(ends: Ends) -> list[bool]:
    """Of each end, whether it knows."""
    found = []
    for end in ends:
        end.setblocking(False)
        try:
            found.append(end.recv(1) == b"")
        except BlockingIOError:
            found.append(False)
        except ConnectionError:
            found.append(True)
    return found


def test_a_severed_host_keeps_only_the_connections_with_itself() -> None:
    with ExitStack() as undo:
        hosts = undo.enter_context(at_the_centre())
        hosts.forward(VICTIM, PORT, REGISTRY)
        made = Connections(hosts, undo)
        victim = made.listen(VICTIM, hosts.address(VICTIM))
        other = made.listen(OTHER, hosts.address(OTHER))
        registry = made.listen(REGISTRY, hosts.address(VICTIM), PORT)
        within = made.listen(VICTIM, LOOPBACK)
        gone = [
            made.make(OTHER, victim),
            made.make(VICTIM, other),
            made.make(VICTIM, registry),
        ]
        kept = [
            made.make(VICTIM, victim),
            made.make(VICTIM, within),
            made.make(OTHER, other),
            made.make(REGISTRY, other),
        ]

        hosts.sever(VICTIM)
        assert [ended(ends) for ends in gone] == [[True, True]] * len(gone)
        assert [ended(ends) for ends in kept] == [[False, False]] * len(kept)
        with pytest.raises(TimeoutError):
            made.dial(OTHER, victim, UNANSWERED_S)

        hosts.mend(VICTIM)
        again = [made.make(OTHER, victim), made.make(VICTIM, registry)]
        assert [ended(ends) for ends in again] == [[False, False]] * len(again)
