# SPDX-License-Identifier: Apache-2.0
"""Ports of this host that are free, or taken on purpose."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["held_port", "two_ports"]

HOST = "127.0.0.1"


@contextlib.contextmanager
def held_port(host: str = HOST) -> Iterator[int]:
    """A port at which nobody listens but who is told of it: with SO_REUSEADDR, as often as may be.
    The kernel gives it to nobody else meanwhile."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def two_ports(taken: int) -> Iterator[int]:
    """The first of two ports in a row, of which so many have a listener. The others are free, and
    other processes of the tests look elsewhere first."""
    begin = os.getpid() * 100 % 12_000
    for offset in range(0, 12_000, 2):
        first = 20_000 + (begin + offset) % 12_000
        with contextlib.ExitStack() as undo:
            socks = [undo.enter_context(socket.socket()) for _ in range(2)]
            try:
                for i, sock in enumerate(socks):
                    sock.bind((HOST, first + i))
            except OSError:
                continue
            for sock in socks[taken:]:
                sock.close()
            for sock in socks[:taken]:
                sock.listen()
            yield first
            return
    raise AssertionError("no two ports in a row are free")
