# SPDX-License-Identifier: Apache-2.0
"""Which faults come, in which order. Pure: a seed says all of it.

One fault is under way at a time, and the next one comes when the servers have recovered from it:
so a run shows of each fault what it alone costs, and one prefill and one decode server are always
undisturbed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

__all__ = [
    "KINDS",
    "REGISTRY",
    "SERVERS",
    "SHARED",
    "Fault",
    "Kind",
    "faults",
    "pair_of",
    "within",
]

Kind = Literal[
    "kill",
    "freeze",
    "cut",
    "sever",
    "slow",
    "lossy",
    "control-cut",
    "control-lossy",
    "full",
    "registry",
    "registry-dies",
    "newcomer",
    "stranger",
    "intruder",
]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
#: Those that mean the same whoever hands KV over. The others concern what only we have: a registry
#: that can be away, control links on ports of their own, a secret; and noise, to which stock
#: backends make no promise.
SHARED: Final[tuple[Kind, ...]] = ("kill", "freeze", "cut", "sever", "slow", "lossy", "full")
SERVERS: Final = ("prefill-0", "prefill-1", "decode-0", "decode-1")
#: The host of the second prefill server's registry; the first one's is in its main process.
REGISTRY: Final = "registry"

#: Seconds that a fault lasts: the least and the most. A killed server is started again at once.
_LASTS_S: Final[dict[Kind, tuple[float, float]]] = {
    "kill": (0.0, 0.0),
    "freeze": (2.0, 15.0),
    "cut": (2.0, 15.0),
    # Some last longer than a lease: a prefill server has to register again, too.
    "sever": (2.0, 20.0),
    "slow": (5.0, 10.0),
    "lossy": (5.0, 10.0),
    "control-cut": (2.0, 15.0),
    "control-lossy": (5.0, 15.0),
    "full": (5.0, 10.0),
    "registry": (2.0, 15.0),
    # A registry that is away for longer than a lease (15 s) has forgotten nothing: it begins empty.
    "registry-dies": (2.0, 25.0),
    "newcomer": (2.0, 8.0),
    "stranger": (3.0, 6.0),
    "intruder": (3.0, 6.0),
}
#: For how long `within` has a fleet recover: after a fault, and where a server starts again.
_RECOVERS_S: Final = 4.0
_RECOVERY_S: Final[dict[Kind, float]] = {"kill": 12.0}
#: Seconds of undisturbed traffic between the end of one and the next.
_GAP_S: Final = (1.0, 5.0)


@dataclass(frozen=True)
class Fault:
    """One disturbance of one server.

    gap_s: undisturbed traffic before it.
    lasts_s: until it is undone.
    alone: meanwhile nobody but the two pairs has clients, so that what the other pair does tells
        of this fault (`rates`).
    """

    kind: Kind
    victim: str
    gap_s: float
    lasts_s: float
    alone: bool = False

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.kind} {self.victim}{lasts}"


def faults(
    seed: int, kinds: Sequence[Kind] = KINDS, lasts_s: float | None = None
) -> Iterator[Fault]:
    """Without end. Each kind comes before any comes again, with another victim each time as long
    as there are others. Every other fault of a server is `alone`. lasts_s: of each fault that
    lasts at all, in place of what the seed says."""
    rng = random.Random(seed)
    hit: dict[Kind, list[str]] = {kind: [] for kind in kinds}
    alone = False
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            left = [name for name in _victims(kind) if name not in hit[kind]]
            if not left:
                hit[kind].clear()
                left = list(_victims(kind))
            victim = rng.choice(left)
            hit[kind].append(victim)
            gap_s, by_seed_s = rng.uniform(*_GAP_S), rng.uniform(*_LASTS_S[kind])
            times = gap_s, lasts_s if lasts_s and by_seed_s else by_seed_s
            if victim in SERVERS:
                alone = not alone
            yield Fault(kind, victim, *times, alone and victim in SERVERS)


def within(
    seed: int, kinds: Sequence[Kind], seconds: float, lasts_s: float | None = None
) -> list[Fault]:
    """The faults of a comparison: as many as come in that time if the servers recover from each as
    fast as a good backend's do. So they are the same for everyone, however long that takes him."""
    found: list[Fault] = []
    left_s = seconds
    for fault in faults(seed, kinds, lasts_s):
        left_s -= fault.gap_s + fault.lasts_s + _RECOVERY_S.get(fault.kind, _RECOVERS_S)
        if left_s < 0:
            return found
        found.append(replace(fault, alone=False))
    raise AssertionError("`faults` has no end")


def pair_of(name: str) -> int:
    """0 or 1: the pair that a server belongs to."""
    return int(name.rpartition("-")[2])


def _victims(kind: Kind) -> tuple[str, ...]:
    match kind:
        case "registry":
            return (SERVERS[0], REGISTRY)
        case "registry-dies":
            return (REGISTRY,)
        case "newcomer":
            return SERVERS[2:]
        case _:
            return SERVERS
