# SPDX-License-Identifier: Apache-2.0
"""Which devices of two engines make rails, and how fast these are taken to be: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["nominal", "pairs", "partners"]

RATE_UNKNOWN: Final = 1e9
"""Speed of ports that do not tell it: any will do, as long as it is the same for all."""


def nominal(rates: Sequence[float]) -> list[float]:
    """The speeds of ports in bytes per second; where one is not known (0), it is taken to be the
    fastest."""
    fastest = max(rates, default=0.0) or RATE_UNKNOWN
    return [rate or fastest for rate in rates]


def pairs(local_nics: int, remote_nics: int) -> npt.NDArray[np.int64]:
    """Local and remote NIC of each rail, shape (rails, 2), as many rails as the larger side has.

    With equal numbers NIC i goes with NIC i, the pair that rail-only fabrics connect; otherwise
    each NIC of the smaller side serves as evenly many of the larger as can be.
    """
    if local_nics < 1 or remote_nics < 1:
        raise ValueError(f"no rail between {local_nics} local and {remote_nics} remote NICs")
    rail = np.arange(max(local_nics, remote_nics))
    return np.stack((rail % local_nics, rail % remote_nics), axis=1)


def partners(nic: int, remote_nics: int) -> tuple[int, ...]:
    """Remote NICs in the order in which to probe them for a local one: its like first."""
    return tuple((nic + step) % remote_nics for step in range(remote_nics))
