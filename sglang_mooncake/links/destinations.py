# SPDX-License-Identifier: Apache-2.0
"""The decode ranks that a prefill rank can write to: one entry per control connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import te
from sglang_mooncake.layout import Place, Plan

__all__ = ["Destination", "Destinations", "NoDataPath"]

#: Control connections of one decode rank: one for each name by which it knows our registry.
PER_ENGINE_MAX = 4
#: Plans for so many ranks take some hundred megabytes for the largest models.
DESTINATIONS_MAX = 16_384


class NoDataPath(LookupError):
    """The decode rank that asked cannot be written to any more."""


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """A decode rank that said hello, and to which a data path stands.

    key: its control connection, as room requests name it.
    rank: for sentences.
    place: which rank of its instance it is.
    """

    key: str
    rank: str
    peer: te.Peer
    plan: Plan
    place: Place

    @property
    def engine(self) -> tuple[str, int]:
        """Which life of which process it is."""
        return self.peer.id, self.peer.epoch


class Destinations:
    """Pure, but for `Destination.peer`."""

    def __init__(self) -> None:
        self._by_key: dict[str, Destination] = {}  # the oldest hello first

    def __contains__(self, key: str) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Destination]:
        return iter(list(self._by_key.values()))

    def get(self, key: str) -> Destination | None:
        return self._by_key.get(key)

    def __getitem__(self, key: str) -> Destination:
        """Raises NoDataPath."""
        found = self._by_key.get(key)
        if found is None:
            raise NoDataPath("the data connection to the decode rank has been lost")
        return found

    def add(self, destination: Destination) -> list[Destination]:
        """Keeps it, in the place of what the same connection said before; returns those that had
        to go for it, which are kept no more."""
        self._by_key.pop(destination.key, None)
        self._by_key[destination.key] = destination
        alike = self.of_engine(destination)
        crowd = alike[:-PER_ENGINE_MAX]
        if len(self._by_key) - len(crowd) > DESTINATIONS_MAX:
            crowd.append(next(iter(self._by_key.values())))
        for one in crowd:
            del self._by_key[one.key]
        return crowd

    def of_engine(self, destination: Destination) -> list[Destination]:
        """All connections of the same decode rank, the oldest first."""
        return [one for one in self._by_key.values() if one.engine == destination.engine]

    def remove(self, key: str) -> Destination | None:
        """None if it is not there."""
        return self._by_key.pop(key, None)
