# SPDX-License-Identifier: Apache-2.0
"""What stands behind a store of Mooncake's class that was set up."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from typing import Final

import te
from kvstore.store import Store
from sglang_mooncake.faces.mooncake_store.arena import Arena
from sglang_mooncake.faces.mooncake_store.objects import Objects
from sglang_mooncake.faces.mooncake_store.options import Options
from sglang_mooncake.faces.mooncake_store.sessions import Sessions
from sglang_mooncake.faces.mooncake_store.settings import Setup
from te.memory_kinds import HOST, kind_of

__all__ = ["StoreImpl"]

logger = logging.getLogger(__name__)

PORTS: Final = (12300, 14300)
"""Among which Mooncake chooses one where the caller names none. Nothing listens there: it is a part
of a process's name."""

SETTLE_TIMEOUT_S: Final = 2.0
POLL_S: Final = 0.01


class StoreImpl:
    """Any thread may call anything."""

    def __init__(self, options: Options, setup: Setup, port: int) -> None:
        """Raises what ``Store`` raises, and what its engine does for the arena."""
        name = setup.hostname
        self.hostname: Final = name if name.rpartition(":")[2].isdecimal() else f"{name}:{port}"
        with contextlib.ExitStack() as undo:
            self.store: Final = undo.enter_context(options.open_store(setup))
            self.arena: Final = Arena(self.store, setup.buffer_bytes)
            self.objects: Final = Objects(self.store, setup.deployment)
            self.sessions: Final = Sessions(self.objects)
            _settle(self.store)
            self._undo = undo.pop_all()
        self._lock = threading.Lock()
        self._regions: dict[int, te.Region] = {}

    def close(self) -> None:
        """Ends the use of the store. What the owner of the host has stays there."""
        self._undo.close()

    def register(self, address: int, nbytes: int) -> None:
        """``te.RegistrationError``, also for memory that is registered."""
        memory: object = address
        if nbytes > 0 and kind_of(address) is HOST:
            # A buffer's bytes are compared with their checksum when they come.
            memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        region = self.store.register(memory, nbytes)
        with self._lock:
            self._regions[address] = region

    def deregister(self, address: int) -> None:
        """What begins there. ``ValueError`` if that was not registered. After any other error it
        still is."""
        with self._lock:
            region = self._regions.get(address)
        if region is None:
            raise ValueError(f"no registered memory begins at {address:#x}")
        self.store.deregister(region)
        with self._lock:
            if self._regions.get(address) is region:  # else registered again by now
                del self._regions[address]

    def room_from(self, address: int) -> int:
        """How many registered bytes there are from an address on; 0 for none."""
        with self._lock:
            regions = list(self._regions.values())
        return next((one.end - address for one in regions if one.address <= address < one.end), 0)


def _settle(store: Store) -> None:
    """Waits until this process knows what others have: who has set up Mooncake's store finds at
    once what is there. For an owner that does not answer it waits no longer than for any answer."""
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not store.knows_all:
        if time.monotonic() >= deadline_s:
            logger.warning(
                "mooncake.store over kvstore: not all processes that lend memory have answered"
                " within %g s; what they hold is found once they do",
                SETTLE_TIMEOUT_S,
            )
            return
        time.sleep(POLL_S)
