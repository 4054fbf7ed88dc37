# SPDX-License-Identifier: Apache-2.0
"""What an owner does from time to time: it makes room, and ends claims whose time is over."""

from __future__ import annotations

import logging
import threading
from typing import Final

from kvstore.owner.owner import Owner

__all__ = ["Ticking"]

logger = logging.getLogger(__name__)

TICK_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 10.0


class Ticking:
    """A thread of its own for that: no answer keeps an owner from making room."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-ticks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for a tick under way, ``CLOSE_TIMEOUT_S`` at most."""
        self._ended.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the thread {self._thread.name} does not end")

    def _run(self) -> None:
        while not self._ended.wait(TICK_S):
            try:
                self._owner.tick()
            except Exception:
                logger.exception("a bug in the store: the owner's tick raised")
