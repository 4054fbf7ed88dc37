# SPDX-License-Identifier: Apache-2.0
"""A registry of this package at which stores meet, and that a test may end and start again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpu_serving.ports import PortBlock
from store_redis import SECRET

from bootstrap_server import BootstrapServer
from bootstrap_server.admission.secret import Keys

__all__ = ["RegistryServer", "registry_server"]

HOST = "127.0.0.1"


class RegistryServer:
    """It keeps nothing: one that is started again has lost all."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        self._keys = Keys.from_secrets(secrets).registry
        self._ports = PortBlock()
        self.url = f"registry://{HOST}:{self._ports.first}"
        self._server: BootstrapServer | None = None

    def start(self) -> None:
        """Returns when it answers."""
        self._server = BootstrapServer(HOST, self._ports.first, keys=self._keys)

    def kill(self) -> None:
        """Ends it and all its connections; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        self.kill()
        self._ports.close()


@contextmanager
def registry_server(*secrets: bytes) -> Iterator[RegistryServer]:
    """One that runs; ``secrets``: whose it serves."""
    server = RegistryServer(secrets or (SECRET,))
    try:
        server.start()
        yield server
    finally:
        server.close()
