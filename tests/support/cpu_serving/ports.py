# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that are started side by side, by this process and by others."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Self

from cpu_serving.processes import ServingError

__all__ = ["HOST", "PortBlock"]

HOST = "127.0.0.1"
# SGLang derives further ports from the one it is given (with DP attention up to about 250 above).
NUMBER = 400
PROBED_OFFSETS = (0, 1, *range(225, 245))
FIRST_PORT = 11_000
LAST_PORT = 31_000  # below the range the kernel gives to outgoing connections


class PortBlock:
    """A range of ports that is ours until `close`: its last one is kept bound, so that nobody who
    asks for a block gets this one before a server listens here, some seconds later."""

    def __init__(self) -> None:
        """Raises ServingError: no block is free."""
        blocks = range(FIRST_PORT, LAST_PORT, NUMBER)
        start = os.getpid() % len(blocks)  # two processes begin to look at different places
        for i in range(len(blocks)):
            self.first = blocks[(start + i) % len(blocks)]
            self._guard = socket.socket()
            with suppress(OSError):
                self._guard.bind((HOST, self.first + NUMBER - 1))
                if all(_is_free(self.first + offset) for offset in PROBED_OFFSETS):
                    return
            self._guard.close()
        raise ServingError(f"no block of {NUMBER} free ports between {FIRST_PORT} and {LAST_PORT}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the ports back. Idempotent."""
        self._guard.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
