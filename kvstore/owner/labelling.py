# SPDX-License-Identifier: Apache-2.0
"""Memory of an owner for labels (``kvstore.objects.labels``)."""

from __future__ import annotations

import threading
from typing import Any, Final

import te
from kvstore.objects.labels import LABEL_BYTES_MAX

__all__ = ["LabelRooms"]

ROOMS: Final = 256
"""Each for one client's reserved slots; who comes when all are taken gets slots without."""


class LabelRooms:
    """Registered memory, in rooms that are known by their address. Thread-safe."""

    def __init__(self, engine: te.Engine) -> None:
        self._engine = engine
        self._buffer: Any = te.allocate(ROOMS * LABEL_BYTES_MAX)
        self._bytes = memoryview(self._buffer)
        self._region = engine.register(self._buffer, remote="tagged")
        self._free = list(range(ROOMS))
        self._lock = threading.Lock()

    def close(self) -> None:
        """Nobody can write there any more; raises what ``te.Engine.deregister`` raises."""
        self._engine.deregister(self._region)

    def take(self) -> int:
        """A room, to be given back once nothing can land there any more; 0 if none is free."""
        with self._lock:
            return self._region.address + self._free.pop() * LABEL_BYTES_MAX if self._free else 0

    def give_back(self, room: int) -> None:
        """Nobody writes there any more."""
        with self._lock:
            self._free.append((room - self._region.address) // LABEL_BYTES_MAX)

    def read(self, room: int) -> bytes:
        """What lies there."""
        first = room - self._region.address
        return bytes(self._bytes[first : first + LABEL_BYTES_MAX])
