# SPDX-License-Identifier: Apache-2.0
"""Which faults there are, and what is said of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["NAMES", "ROWS", "Fault", "Row"]

Fault = Literal["near NIC", "far NIC", "cut", "restart"]


@dataclass(frozen=True)
class Row:
    """One fault.

    fault: a NIC's own link goes down, at the source or at the destination; packets vanish behind a
        port that stays up; or the destination's process is killed and started again.
    lasts_s: until it is undone.
    rails: NICs on each side; over TCP there is one.
    """

    fault: Fault
    lasts_s: float
    rails: int


ROWS: Final[dict[str, Row]] = {
    "nic-dies": Row("near NIC", 3.0, 2),
    "far-nic-dies": Row("far NIC", 3.0, 2),
    "cut-50ms": Row("cut", 0.05, 2),
    "cut-1s": Row("cut", 1.0, 2),
    "cut-10s": Row("cut", 10.0, 2),
    "only-cut-50ms": Row("cut", 0.05, 1),
    "only-cut-1s": Row("cut", 1.0, 1),
    "only-cut-10s": Row("cut", 10.0, 1),
    "restart": Row("restart", 0.0, 1),
}
NAMES: Final = tuple(ROWS)
