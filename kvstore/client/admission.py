# SPDX-License-Identifier: Apache-2.0
"""Which objects are worth loading: those that are expected to be loaded in less time than they are
computed again. Pure: times are passed in.

Reads from each owner are measured as they end, and whoever computes says how long that takes.
While one of the two is not known, everything is loaded, which is also how it becomes known. An
owner whose objects were computed instead is tried again now and then, with few of them, since its
network may have become faster.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PROBE_SHARE", "Admitted", "Numbers", "Speed", "admit", "expected_s", "is_probe"]

MEASURED_MIN: Final = 3
"""Measurements before there is an estimate: the first ones pay for what is set up late."""
FADES: Final = 0.75
"""What a measurement is worth when the next one has come."""
PROBE_ONE_IN: Final = 8
"""Of the prompts that a slow owner has, one in so many is a probe …"""
PROBE_SLOT_S: Final = 10.0
"""… and which ones, changes after that time, so that a prompt that always comes is one at last."""
PROBE_SHARE: Final = 0.1
"""A probe is expected to add this part of the time that computing all objects would take, at most;
but it has one object at least."""

Numbers: TypeAlias = npt.NDArray[np.unsignedinteger]


class Speed:
    """Seconds for a unit (a byte, a token), from measurements that fade.

    Those of many units count for more, since few units take longer for their number. They do not
    take less: a measurement that is faster than what was known counts as much as all before it,
    however small it is. So a probe is enough to see that a network is fast again.
    """

    __slots__ = ("_amount", "_count", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._amount = 0.0
        self._count = 0

    def took(self, seconds: float, amount: float) -> None:
        """So many units took so long."""
        kept = FADES
        if seconds * self._amount < self._seconds * amount:
            kept = min(FADES, amount / self._amount)
        self._seconds = kept * self._seconds + seconds
        self._amount = kept * self._amount + amount
        self._count += 1

    @property
    def seconds_per_unit(self) -> float | None:
        """None while too little was measured."""
        if self._count < MEASURED_MIN or not self._amount > 0:
            return None
        return self._seconds / self._amount


@dataclass(frozen=True, slots=True)
class Admitted:
    """What became of the objects that were found, from the first one on."""

    found: int
    #: The first so many are worth loading.
    offered: int
    #: Expected of all that were found, to load them and to compute them; 0.0: not known.
    load_s: float = 0.0
    compute_s: float = 0.0
    #: Whether what is offered is a probe: more than what is worth it.
    probe: bool = False

    @property
    def declined(self) -> int:
        """Objects that are computed although they were found."""
        return self.found - self.offered


def admit(
    owners: Numbers, load_s: Mapping[int, float], compute_s: float | None, *, probe: bool = False
) -> Admitted:
    """Cuts a run of objects where loading more of them stops being worth it.

    Owners are read from at the same time, so that a load takes as long as its slowest owner.

    Args:
        owners: shape (n,), the number of the owner of each object, in the order in which they are
            needed: those behind a cut are computed.
        load_s: by owner, what reading one object takes. Owners that are not in it count as
            instantaneous: they have to be measured first.
        compute_s: what computing one object takes; None if it is not known.
        probe: whether some behind the cut are offered all the same, for a measurement.
    """
    found = len(owners)
    if compute_s is None or not found:
        return Admitted(found, found)
    counts = np.bincount(owners)
    each_s = {one: load_s.get(one, 0.0) for one in np.flatnonzero(counts).tolist()}
    all_load_s = max(float(counts[one]) * each for one, each in each_s.items())
    all_compute_s = found * compute_s
    if max(each_s.values()) <= compute_s:  # Each one more is worth it.
        return Admitted(found, found, all_load_s, all_compute_s)
    loads_s = np.zeros(found)
    for one, each in each_s.items():
        np.maximum(loads_s, np.cumsum(owners == one) * each, out=loads_s)
    gains_s = np.arange(1, found + 1) * compute_s - loads_s
    best = found - 1 - int(gains_s[::-1].argmax())  # Of equal ones the longest.
    worth = best + 1 if gains_s[best] >= 0 else 0
    if not probe or worth == found:
        return Admitted(found, worth, all_load_s, all_compute_s)
    spent_s = float(loads_s[worth - 1]) if worth else 0.0
    affordable = np.searchsorted(loads_s, spent_s + PROBE_SHARE * all_compute_s, side="right")
    return Admitted(found, max(worth + 1, int(affordable)), all_load_s, all_compute_s, probe=True)


def expected_s(owners: Numbers, load_s: Mapping[int, float]) -> float | None:
    """How long a load of all objects takes; None if one of the owners was not measured yet."""
    counts = np.bincount(owners)
    numbers = np.flatnonzero(counts).tolist()
    if not numbers or any(one not in load_s for one in numbers):
        return None
    return max(load_s[one] * float(counts[one]) for one in numbers)


def is_probe(first_key: bytes, now_s: float) -> bool:
    """Whether the objects that begin with this key are offered for a measurement.

    All ranks of a server give the same answer without a word to each other: they ask for the same
    key, and ``now_s`` is the time of day. That is needed, since a server loads what all of its
    ranks offer.
    """
    slot = int(now_s // PROBE_SLOT_S)
    return zlib.crc32(first_key + slot.to_bytes(8, "little")) % PROBE_ONE_IN == 0
