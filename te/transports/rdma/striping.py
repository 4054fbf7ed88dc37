# SPDX-License-Identifier: Apache-2.0
"""Which devices of two engines make rails, and how fast these are taken to be: pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["nominal", "pairs", "partners"]

RATE_UNKNOWN: Final = 1e9
"""Speed of ports that do not tell it: any will do, as long as it is the same for all."""


def nominal(rates: Sequence[float]) -> list[float]:
    """The speeds of ports in bytes per second; where one is not known (0), it is taken to be the
    fastest."""
    fastest = max(rates, default=0.0) or RATE_UNKNOWN
    return [rate or fastest for rate in rates]


def pairs(local_nics: int, remote_nics: int) -> list[tuple[int, int]]:
    """Local and remote NIC of each rail, as many rails as the larger side has; none without both.

    With equal numbers NIC i goes with NIC i, the pair that rail-only fabrics connect; otherwise
    each NIC of the smaller side serves as evenly many of the larger as can be.
    """
    rails = max(local_nics, remote_nics) if local_nics and remote_nics else 0
    return [(rail % local_nics, rail % remote_nics) for rail in range(rails)]


def partners(nic: int, remote_nics: int) -> tuple[int, ...]:
    """Remote NICs in the order in which to probe them for a local one: its like first."""
    return tuple((nic + step) % remote_nics for step in range(remote_nics))
