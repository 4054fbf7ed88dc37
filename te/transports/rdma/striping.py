# SPDX-License-Identifier: Apache-2.0
"""Which rail carries which bytes: pure.

A transfer is divided once, when it is submitted: ``shares`` says how many bytes each rail takes so
that all of them end at the same time, ``stripe`` where in the blocks each rail begins. Numbers for
the few rails there are, where a call of numpy costs more than all of the arithmetic; a compiled
pass over the many blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from te import _blocks
from te.blocks import Blocks

__all__ = [
    "GRAIN_NBYTES",
    "PENALTY",
    "RATE_FLOOR",
    "RATE_LEVEL",
    "SPLIT_NBYTES",
    "Lane",
    "Mark",
    "Pace",
    "levelled",
    "measured",
    "nominal",
    "pairs",
    "partners",
    "patience",
    "reachable",
    "shares",
    "stripe",
]

Mark: TypeAlias = tuple[int, int]
"""A place in a list of blocks: the index of one, and an offset within it in bytes."""

PENALTY: Final = (1.0, 4.0, 16.0)
"""By distance, how many times longer a byte is taken to need: far NICs help out when near ones
have work for so much longer, since they are the near ones of somebody else's memory."""

RATE_FLOOR: Final = 1 / 16
"""A rail is never believed to be slower than this part of the fastest: it keeps getting work, so
its rate is measured again."""

GRAIN_NBYTES: Final = 128 << 10
"""One more rail for each so many bytes: below that a further rail costs more than it carries."""

RATE_LEVEL: Final = 3.0
"""Rails at most so many times slower than the fastest count as equal to it.

Rails that share a bottleneck (a processor, a switch, the peer) are measured by chance, and if
shares followed that, the next measurement would follow the shares. Four equal soft devices that
share one processor, 2 MiB a rail and transfer: single rates differed 4.7-fold, and after fading
2.2-fold in 1 of 100 cases, 2.6-fold in 1 of 1000. What is left of a difference evens out by bytes
in flight, and by idle rails, which take pieces from others.
"""

SPLIT_NBYTES: Final = 64 << 10
"""Smaller blocks go to one rail whole; larger ones may be cut."""

CUT_ALIGN: Final = 4096
"""Cuts within a block fall on multiples of this offset: the unit of the NIC's page tables."""

RATE_MEMORY_S: Final = 0.5
"""Time constant of the measured rate, in seconds of the rail being busy. With 0.1 the soft devices
of ``RATE_LEVEL`` differed 4.4-fold in 1 of 100 cases."""

RATE_UNKNOWN: Final = 1e9
"""Speed of ports that do not tell it: any will do, as long as it is the same for all."""


class Pace(NamedTuple):
    """What a rail moved lately, older measurements counting for less; ``rate`` is what it says."""

    nbytes: float
    busy_s: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.busy_s


class Lane(NamedTuple):
    """A rail that can take work."""

    #: Bytes per second.
    rate: float
    #: Bytes it still has to move.
    in_flight: float = 0.0
    #: How far its NIC is from the memory: 0 near, 1 the same NUMA node, 2 another.
    distance: int = 0


def shares(
    rails: Sequence[Lane], total_nbytes: int, turn: int = 0, grain_nbytes: int = GRAIN_NBYTES
) -> list[float]:
    """Bytes for each of ``rails``; the sum is ``total_nbytes``.

    All rails that get something are expected to end at the same time, and one that gets nothing
    has work for longer than that. At most one rail per ``grain_nbytes`` is used. Among equals
    the one at ``turn`` modulo their number is first, so that a counter of transfers makes small
    ones go round. ``ValueError`` when there are no rails, for a rate that is not positive and
    finite, negative bytes in flight, or an unknown distance.
    """
    count = len(rails)
    if not count:
        raise ValueError("there is no rail to share the bytes")
    floor = max(rails)[0] * RATE_FLOOR
    speed, work = [], []
    for rate, in_flight, far in rails:
        if not 0 < rate < math.inf:
            raise ValueError(f"rates must be positive bytes per second, not {rate}")
        if not in_flight >= 0:
            raise ValueError(f"bytes in flight must not be negative: {in_flight}")
        if not 0 <= far < len(PENALTY):
            raise ValueError(f"distances must be 0 to {len(PENALTY) - 1}, not {far}")
        speed.append(max(rate, floor) / PENALTY[far])
        work.append(in_flight)
    chosen: Sequence[int] = range(count)
    most = max(1, -(-total_nbytes // grain_nbytes))
    if most < count:  # Those that would be first to end a grain, and of those the idlest.
        grain = min(total_nbytes, grain_nbytes)
        ends = [(work[i] + grain) / speed[i] for i in chosen]
        chosen = sorted(chosen, key=lambda i: (ends[i], (i - turn) % count))[:most]
    if any(work):
        chosen = sorted(chosen, key=lambda i: work[i] / speed[i])
    # As water fills a vessel of steps: the level, in seconds, rises over one rail more as long as
    # that one would be done before.
    depth, width, used = float(total_nbytes), 0.0, 0
    for i in chosen:
        if used and work[i] / speed[i] * width >= depth:
            break
        depth, width, used = depth + work[i], width + speed[i], used + 1
    result = [0.0] * count
    for i in chosen[:used]:
        result[i] = max(depth / width * speed[i] - work[i], 0.0)
    first = chosen[0]
    result[first] = max(result[first] + total_nbytes - sum(result), 0.0)  # what rounding left
    return result


def stripe(
    blocks: Blocks, weights: Sequence[float], split_nbytes: int = SPLIT_NBYTES
) -> list[Mark]:
    """Divides blocks in proportion to ``weights``, one of each rail: rail r has the bytes from mark
    r to mark r + 1, maybe none; every byte goes to one rail.

    A rail of weight 0 gets none. Blocks of less than ``split_nbytes`` go to one rail whole, so that
    a rail is off its part by less than ``split_nbytes`` at either end of its run. ``ValueError``
    for weights that are negative or all 0.
    """
    sums = list(itertools.accumulate(weights))
    if not sums or not sums[-1] > 0 or not min(weights) >= 0:
        raise ValueError(f"weights must not be negative, and not all 0: {weights}")
    if not len(blocks):
        return [(0, 0)] * (len(sums) + 1)
    # The last rail with a weight takes all that is left: none for those behind it.
    total, last = blocks.total_nbytes, sums[-1]
    wanted = [total if one == last else min(round(one / last * total), total) for one in sums]
    marks = [(0, 0)]
    for at, (block, end, nbytes) in zip(wanted, _blocks.locate(blocks.array, wanted), strict=True):
        offset = at - end + nbytes
        if offset == nbytes or (nbytes < split_nbytes and 2 * offset >= nbytes):
            marks.append((block + 1, 0))
        elif nbytes < split_nbytes:
            marks.append((block, 0))
        else:
            marks.append((block, offset - offset % CUT_ALIGN))
    return marks


def nominal(rates: Sequence[float]) -> list[Pace]:
    """Paces before anything was measured, of ports with these speeds in bytes per second; 0 where
    it is not known, and then it is taken to be the fastest. They count as if measured for long, so
    that the first short measurement, taken by chance, is not believed at once."""
    fastest = max(rates, default=0.0) or RATE_UNKNOWN
    return [Pace((rate or fastest) * RATE_MEMORY_S, RATE_MEMORY_S) for rate in rates]


def measured(pace: Pace, nbytes: float, busy_s: float) -> Pace:
    """The pace after ``nbytes`` more in ``busy_s`` seconds during which there always was work.

    Older measurements fade with ``RATE_MEMORY_S`` of busy time, so a long one counts for more than
    a short one; no time at all changes nothing.
    """
    if busy_s <= 0:
        return pace
    kept = math.exp(-busy_s / RATE_MEMORY_S)
    # Something moved in that time, or nobody would have looked: a rate is never 0.
    return Pace(kept * pace.nbytes + max(nbytes, 1.0), kept * pace.busy_s + busy_s)


def levelled(rates: Sequence[float]) -> list[float]:
    """Rates with those not far below the fastest (``RATE_LEVEL``) raised to it."""
    fastest = max(rates, default=0.0)
    return [fastest if rate * RATE_LEVEL >= fastest else rate for rate in rates]


def reachable(rails: Iterable[int], distances: Sequence[int | None]) -> tuple[list[int], list[int]]:
    """Those of ``rails`` that memory uses, and their distances; all of them, as far ones, if it
    should use none: better by another way than not at all. ``distances`` are by rail, None of one
    that is not to be used."""
    table = list(rails)
    used = [(i, far) for i in table if (far := distances[i]) is not None]
    if not used:
        return table, [len(PENALTY) - 1] * len(table)
    return [i for i, _ in used], [far for _, far in used]


def patience(distances: Sequence[int | None], rates: Sequence[float]) -> bytes:
    """By rail, how many pieces another must have waiting before this one, when it has nothing to
    do, takes one of them: two, and more in proportion to ``PENALTY`` the farther it is and to the
    rates the slower, or the transfer would end with that one piece. 0 of a rail that is not to be
    used while another is there; 255 at most."""
    fastest = max(rates)
    floor = fastest * RATE_FLOOR
    return bytes(
        0 if far is None else min(255, int(2 * PENALTY[far] * fastest / max(rate, floor)))
        for far, rate in zip(distances, rates, strict=True)
    )


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
