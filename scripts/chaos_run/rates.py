# SPDX-License-Identifier: Apache-2.0
"""What a fault of one pair costs the other pair. Pure.

Of a fault that is `alone` each pair has the same clients before, during and after it, and nobody
else has any; each of them asks again as soon as it is answered, the same prompts in turns. Each
pair, with its clients, has cores of its own (`Deployment`), so that a victim that starts, or stands
still, neither takes CPU time from the other pair nor leaves it any; and its cores do not rest
meanwhile (`beside.kept_busy`). What the pairs still share is memory, the kernel and the rest of the
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos_run.schedule import SERVERS, pair_of
from chaos_run.traffic import Outcome

__all__ = ["Spared", "Window", "kept", "pair_name", "spared"]

#: With fewer answers expected than this, nothing is said.
ANSWERS_MIN = 60


@dataclass(frozen=True)
class Window:
    """From one time of the monotonic clock to another."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s

    def count(self, way: str, outcomes: Sequence[Outcome]) -> int:
        """Right answers over this way that came in it."""
        return sum(
            one.end == "equal" and one.way == way and self.begin_s <= one.ended_s < self.end_s
            for one in outcomes
        )


@dataclass(frozen=True)
class Spared:
    """The pair without the victim, beside one fault.

    expected: answers that its rate before and after would have given; answered: those there were.
    """

    kind: str
    expected: float
    answered: int


def pair_name(pair: int) -> str:
    """The way over both servers of a pair."""
    return f"{SERVERS[pair]} to {SERVERS[2 + pair]}"


def spared(
    kind: str, victim: str, during: Window, quiet: Sequence[Window], outcomes: Sequence[Outcome]
) -> Spared:
    """`quiet`: before and after, with the same clients."""
    way = pair_name(1 - pair_of(victim))
    quiet_s = sum(window.length_s for window in quiet)
    per_s = sum(window.count(way, outcomes) for window in quiet) / quiet_s
    return Spared(kind, per_s * during.length_s, during.count(way, outcomes))


def kept(found: Sequence[Spared]) -> float | None:
    """The share of its undisturbed rate that the other pair has kept, over all faults; None when
    there were too few answers to tell."""
    expected = sum(one.expected for one in found)
    if expected < ANSWERS_MIN:
        return None
    return sum(one.answered for one in found) / expected
