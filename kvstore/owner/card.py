# SPDX-License-Identifier: Apache-2.0
"""What an owner tells of itself: where its memory is, and what it holds and has done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import add, sub
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OwnerCard", "OwnerStats"]


@dataclass(frozen=True)
class OwnerCard:
    """What a client needs to read from an owner."""

    #: te's card.
    engine: bytes
    epoch: int
    headers_address: int
    slots_address: int
    chunks: int
    object_bytes_max: int
    #: What a snapshot is counted in: the chunks, and behind them parts of what lies in the lower
    #: tier.
    parts: int


@dataclass
class OwnerStats:
    """What an owner holds and has done."""

    objects: int = 0
    claims: dict[str, int] = field(default_factory=dict)
    published: int = 0
    abandoned: int = 0
    evicted: int = 0
    removed: int = 0
    changes: int = 0
    #: Of the slots that objects and claims have.
    bytes_used: int = 0
    #: In the lower tier: objects and their bytes, and what it could hold.
    lower_tier: int = 0
    lower_tier_bytes: int = 0
    lower_tier_capacity: int = 0
    #: Objects that are being written there.
    demoting: int = 0
    #: Objects that were written there, and read from there into memory.
    demoted: int = 0
    promoted: int = 0
    #: Objects that were evicted without a copy in the lower tier.
    dropped: int = 0
    #: Reads and writes of the tier that failed, and objects that were not as they were written.
    tier_failed: int = 0
    tier_corrupted: int = 0
    #: Objects that must not be evicted.
    pinned: int = 0

    def since(self, before: Self) -> Self:
        """What only rises, as it has risen since then; the rest as it is."""
        return self._with(before, sub)

    def behind(self, before: Self) -> Self:
        """What only rises, added to what had risen before; the rest as it is."""
        return self._with(before, add)

    def _with(self, other: Self, combine: Callable[[int, int], int]) -> Self:
        names = {*self.claims, *other.claims}
        claims = {one: combine(self.claims.get(one, 0), other.claims.get(one, 0)) for one in names}
        rising = {one: combine(getattr(self, one), getattr(other, one)) for one in _RISING}
        return replace(self, claims=claims, **rising)


_RISING: Final = (
    "published",
    "abandoned",
    "evicted",
    "removed",
    "demoted",
    "promoted",
    "dropped",
    "tier_failed",
    "tier_corrupted",
)
