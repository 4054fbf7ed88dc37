# SPDX-License-Identifier: Apache-2.0
"""How soon requests are answered again, once a way that was shut is open. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chaos_run.schedule import Fault, Kind
from chaos_run.traffic import Outcome, Way

__all__ = ["AGAIN_S", "Again", "again"]

#: Of kinds after which requests have to be answered again soon.
AGAIN_S: Final[dict[Kind, float]] = {"sever": 2.0}


@dataclass(frozen=True)
class Again:
    """After one fault.

    took_s: by way with its victim, from when the fault was undone until an answer came to a
        request that was asked since then; infinite if none did.
    """

    fault: Fault
    took_s: dict[str, float]

    def late(self) -> list[str]:
        """Of ways that took longer than that, in sentences."""
        limit_s = AGAIN_S[self.fault.kind]
        return [
            f"{self.fault}: over {way} the first answer came {took_s:.2f} s after the way was open"
            for way, took_s in self.took_s.items()
            if took_s > limit_s
        ]


def again(
    fault: Fault, undone_s: float, outcomes: Sequence[Outcome], ways: Sequence[Way]
) -> Again | None:
    """None of kinds for which nothing is said."""
    if fault.kind not in AGAIN_S:
        return None
    return Again(
        fault,
        {
            way.name: min(
                (
                    one.ended_s - undone_s
                    for one in outcomes
                    if one.way == way.name and one.end == "equal" and one.began_s >= undone_s
                ),
                default=math.inf,
            )
            for way in ways
            if fault.victim in way.servers
        },
    )
