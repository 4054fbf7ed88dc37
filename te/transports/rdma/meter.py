# SPDX-License-Identifier: Apache-2.0
"""How fast the rails of a link are, by what the plane has counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from te.transports.rdma.striping import measured, nominal

__all__ = ["Flow", "Meter"]

Flow = tuple[int, int, int, float]
"""Of one rail; ``RdmaLink.rail_flows`` gives them."""


class Meter:
    """The rates of a link's rails. Any thread may call anything."""

    def __init__(self, rates: Sequence[float]) -> None:
        """From the speeds of their ports, in bytes per second, 0 if it is not known."""
        self._paces = nominal(rates)
        self._seen = [(0, 0.0)] * len(rates)
        self._lock = threading.Lock()

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """Bytes per second of each rail, after the present ``flows``."""
        with self._lock:
            for i, (nbytes, busy_s) in enumerate(self._seen):
                _, _, moved, total_s = flows[i]
                if total_s > busy_s:
                    self._paces[i] = measured(self._paces[i], moved - nbytes, total_s - busy_s)
                    self._seen[i] = moved, total_s
            return [pace.rate for pace in self._paces]
