# SPDX-License-Identifier: Apache-2.0
"""Connections that have proved nothing yet, and which of them goes when there are too many. Pure.

Whoever reaches a port can open connections and say nothing, or too little. Nobody is refused for
the number of others: one goes for a new one, the oldest of the source that has most. So a stranger
who opens many closes his own, and one who proves himself soon after he has come finds a place.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["Crowd", "source_of"]

#: What a host, or a household, has of IPv6 (RFC 6177): all of it is one source.
_IPV6_PREFIX_BITS = 64

One = TypeVar("One", bound=Hashable)


def source_of(address: str) -> str:
    """Who counts as one: an IPv4 address, or a network of IPv6, where one host has 2^64 of them."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), _IPV6_PREFIX_BITS), strict=False))


class Crowd(Generic[One]):
    """Connections, by anything that tells them apart; each call takes constant time.

    Args:
        most: how many there may be in all.
        of_source_most: of one source.
    """

    def __init__(self, most: int, of_source_most: int) -> None:
        assert 0 < of_source_most <= most
        self._most, self._of_source_most = most, of_source_most
        self._sources: dict[One, str] = {}
        #: By source, the oldest first.
        self._of_source: dict[str, dict[One, None]] = {}
        #: By how many they have.
        self._of_size: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._fullest = 0

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, one: object) -> bool:
        return one in self._sources

    def enter(self, one: One, source: str) -> None:
        """A connection has come. `surplus` says whether another has to go for it."""
        self.leave(one)
        self._sources[one] = source
        ones = self._of_source.setdefault(source, {})
        self._resize(source, len(ones), len(ones) + 1)
        ones[one] = None

    def leave(self, one: One) -> None:
        """It has proved itself, or has ended; idempotent."""
        source = self._sources.pop(one, None)
        if source is None:
            return
        ones = self._of_source[source]
        del ones[one]
        self._resize(source, len(ones) + 1, len(ones))
        if not ones:
            del self._of_source[source]

    def surplus(self) -> One | None:
        """Which one has to go because there are too many; None if there are not."""
        if len(self) > self._most or self._fullest > self._of_source_most:
            return self.first_to_go()
        return None

    def first_to_go(self) -> One | None:
        """The oldest of the source that has most; None if there is none."""
        if not self._fullest:
            return None
        source = next(iter(self._of_size[self._fullest]))
        return next(iter(self._of_source[source]))

    def _resize(self, source: str, before: int, after: int) -> None:
        if before:
            del self._of_size[before][source]
            if not self._of_size[before]:
                del self._of_size[before]
        if after:
            self._of_size[after][source] = None
            self._fullest = max(self._fullest, after)
        if self._fullest not in self._of_size:
            self._fullest = after  # it was the only one of its size, and has one less
