# SPDX-License-Identifier: Apache-2.0
"""Which of the connections that have not introduced themselves may stay. Pure: time is passed in.

Whoever can reach an engine can open connections and say nothing. None of them is refused for that:
when there are too many, one goes of the source that has the most. That is one that has had time to
speak and has not, or else the oldest. So an engine that says hello soon after it is connected finds
a place however many are silent, or begin to speak and stop.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Final

__all__ = ["HALF_OPEN_MAX", "HALF_OPEN_OF_SOURCE_MAX", "Admission", "HalfOpen", "source_of"]

HALF_OPEN_MAX: Final = 256
"""Connections without a whole hello, over all sources. Far below what a process may have open
(1,024 descriptors where nobody has raised it)."""

HALF_OPEN_OF_SOURCE_MAX: Final = 128
"""Half-open connections of one source address, or of one process of this host."""

FIRST_BYTE_TIMEOUT_S: Final = 2.0
"""An engine calls as soon as it is connected; this is for one whose interpreter is busy."""

SILENT_S: Final = 0.25
"""Who is silent for so long goes before who has begun to speak. A friend is held up for less
before its call (5 ms for each turn of another thread in its interpreter). Else it would be the one
to go where everybody has said a few bytes."""


IPV6_PREFIX_BITS = 64
"""What a host has of IPv6, at least (RFC 6177): 2^64 addresses that are one source."""


def source_of(address: str) -> str:
    """Which source a numeric address is of: itself, or its network of IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), IPV6_PREFIX_BITS), strict=False))


@dataclass(eq=False)
class HalfOpen:
    """A connection that has yet to introduce itself."""

    source: str
    since_s: float
    #: When it must have said everything.
    until_s: float
    has_spoken: bool = False

    @property
    def due_s(self) -> float:
        """When it is given up."""
        if self.has_spoken:
            return self.until_s
        return min(self.since_s + FIRST_BYTE_TIMEOUT_S, self.until_s)


class Admission:
    """The half-open connections of an engine, in the order in which they came or called."""

    def __init__(self) -> None:
        self._half_open: dict[HalfOpen, None] = {}
        self._of_source: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._half_open)

    def enter(self, source: str, now_s: float, hello_timeout_s: float) -> HalfOpen:
        """A connection came. ``surplus`` says whether another has to go for it."""
        one = HalfOpen(source, now_s, now_s + hello_timeout_s)
        self._half_open[one] = None
        self._of_source[source] = self._of_source.get(source, 0) + 1
        return one

    def renew(self, one: HalfOpen) -> None:
        """A connection has called, and has yet to say hello: it counts as the youngest once more,
        so that call and hello have as much time each while many connections come. Its deadline
        stays."""
        if one in self._half_open:
            del self._half_open[one]
            self._half_open[one] = None

    def leave(self, one: HalfOpen) -> None:
        """A connection has introduced itself, or was closed; idempotent."""
        if one not in self._half_open:
            return
        del self._half_open[one]
        left = self._of_source[one.source] - 1
        if left:
            self._of_source[one.source] = left
        else:
            del self._of_source[one.source]

    def surplus(self, now_s: float) -> HalfOpen | None:
        """Which connection has to go because there are too many; None if there are not."""
        fullest = max(self._of_source, key=self._of_source.__getitem__, default=None)
        if fullest is None:
            return None
        if self._of_source[fullest] > HALF_OPEN_OF_SOURCE_MAX:
            return self._first_to_go(fullest, now_s)
        return self._first_to_go(fullest, now_s) if len(self._half_open) > HALF_OPEN_MAX else None

    def sacrifice(self, now_s: float) -> HalfOpen | None:
        """Which connection has to go because there are no descriptors; None if there is none."""
        fullest = max(self._of_source, key=self._of_source.__getitem__, default=None)
        return None if fullest is None else self._first_to_go(fullest, now_s)

    def _first_to_go(self, source: str, now_s: float) -> HalfOpen:
        """Of a source that has some: the one that has been silent for longest, if that was for
        ``SILENT_S``; else the oldest."""
        of_source = [one for one in self._half_open if one.source == source]
        silent = (one for one in of_source if not one.has_spoken)
        return next((one for one in silent if now_s >= one.since_s + SILENT_S), of_source[0])
