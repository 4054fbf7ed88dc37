# SPDX-License-Identifier: Apache-2.0
"""What a long run with bad input is judged by: memory that does not grow, reasons with names."""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["INPUTS", "Reasons", "Steady"]

INPUTS = int(os.environ.get("TE_FUZZ_INPUTS", "2000"))
SAMPLES = 20
LONG = 100_000
GROWTH_BYTES = 24 << 20
"""From the middle of a run to its end; a short one is still filling what it keeps."""
LONG_GROWTH_BYTES = 14 << 20
"""Of a long run. Of a million inputs: 29 bytes each. A queue that nobody emptied took 33 bytes an
input; without it the second half of a million takes 1 to 3 MiB."""


def resident_nbytes() -> int:
    """Memory of this process that is in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


class Steady:
    """Looks at the memory of this process now and then."""

    def __init__(self, inputs: int, name: str) -> None:
        self._inputs, self._name = inputs, name
        self._samples: list[tuple[int, int]] = []

    def look(self, done: int) -> None:
        """After so many inputs."""
        if done * SAMPLES >= len(self._samples) * self._inputs:
            self._samples.append((done, resident_nbytes()))
            if "TE_FUZZ_INPUTS" in os.environ:  # A long run says how far it is.
                mib = self._samples[-1][1] >> 20
                sys.stdout.write(f"{self._name}: {done:,} inputs, {mib} MiB\n")
                sys.stdout.flush()

    def check(self) -> None:
        """At the end: the second half of the inputs took no memory for good."""
        half = [nbytes for done, nbytes in self._samples if 2 * done >= self._inputs]
        grown = resident_nbytes() - half[0]
        bound = GROWTH_BYTES if self._inputs < LONG else LONG_GROWTH_BYTES
        assert grown < bound, f"{grown:,} bytes more since the middle: {self._samples}"


class Reasons(logging.Handler):
    """Counts the reasons for which links have ended, and lets nobody else keep the lines."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        #: How often which violation was named, by how it begins; and other lines.
        self.violations: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self._logger = logging.getLogger("te")

    def emit(self, record: logging.LogRecord) -> None:
        """Of `logging.Handler`."""
        _, said, what = record.getMessage().partition(" broke the protocol: ")
        if said:
            self.violations[what[:12]] += 1
        else:
            self.others[str(record.msg)[:40]] += 1

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._logger.propagate = True
        self._logger.removeHandler(self)
