# SPDX-License-Identifier: Apache-2.0
"""Which faults come, in which order. Pure: a seed says all of it.

One fault is under way at a time, and the next one comes when the servers have recovered from it:
so a run shows of each fault what it alone costs, and one prefill and one decode server are always
undisturbed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

__all__ = ["KINDS", "SERVERS", "Fault", "Kind", "faults"]

Kind = Literal["kill", "freeze", "registry", "cut", "slow", "lossy", "stranger"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SERVERS: Final = ("prefill-0", "prefill-1", "decode-0", "decode-1")

#: Seconds that a fault lasts: the least and the most. A killed server is started again at once.
_LASTS_S: Final[dict[Kind, tuple[float, float]]] = {
    "kill": (0.0, 0.0),
    "freeze": (2.0, 15.0),
    "registry": (2.0, 15.0),
    "cut": (2.0, 15.0),
    "slow": (5.0, 10.0),
    "lossy": (5.0, 10.0),
    "stranger": (3.0, 6.0),
}
#: Seconds of undisturbed traffic between the end of one and the next.
_GAP_S: Final = (1.0, 5.0)


@dataclass(frozen=True)
class Fault:
    """One disturbance of one server.

    gap_s: undisturbed traffic before it.
    lasts_s: until it is undone.
    """

    kind: Kind
    victim: str
    gap_s: float
    lasts_s: float

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} {self.victim}{lasts}"


def faults(seed: int, kinds: Sequence[Kind] = KINDS) -> Iterator[Fault]:
    """Without end. Each kind comes before any comes again, with another victim each time as long
    as there are others."""
    rng = random.Random(seed)
    hit: dict[Kind, list[str]] = {kind: [] for kind in kinds}
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            left = [name for name in _victims(kind) if name not in hit[kind]]
            if not left:
                hit[kind].clear()
                left = list(_victims(kind))
            victim = rng.choice(left)
            hit[kind].append(victim)
            yield Fault(kind, victim, rng.uniform(*_GAP_S), rng.uniform(*_LASTS_S[kind]))


def _victims(kind: Kind) -> tuple[str, ...]:
    # An instance's registry runs in its prefill server's first process.
    return SERVERS if kind != "registry" else SERVERS[:2]
