# SPDX-License-Identifier: Apache-2.0
"""A thread that keeps the interpreter busy, as a serving process' scheduler does."""

from __future__ import annotations

import threading
import time

__all__ = ["BusyLoop"]


class BusyLoop:
    """Runs pure Python until stopped; it gives the interpreter lock away only when asked to."""

    def __init__(self) -> None:
        """Returns once the loop is running."""
        self._stop = False
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="te-bench-busy", daemon=True)
        self._thread.start()
        self._running.wait()

    def cpu_s(self) -> float:
        """Processor time it has used, which is not the contender's."""
        assert self._thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))

    def stop(self) -> None:
        """Returns when it has ended."""
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        self._running.set()
        count = 0
        while not self._stop:
            count += 1
