# SPDX-License-Identifier: Apache-2.0
"""Prefill servers that will not serve a decode rank until somebody changes a setting: who, why,
since when, and when to look again. No I/O and no clock."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from bootstrap_server import Instance, Why

__all__ = ["REFUSED_MAX", "Refused", "RefusedServer"]

#: Requests name servers, so what is kept of them must be bounded.
REFUSED_MAX = 256


class RefusedServer(msgspec.Struct, frozen=True):
    """One server: the address of its registry, on what both differ, the sentence about it, and when
    it was first found (seconds since 1970)."""

    address: str
    why: Why
    sentence: str
    since_s: float


@dataclass(slots=True)
class _Entry:
    server: RefusedServer
    #: The life that is refused; None where the registry tells of none.
    instance: Instance | None
    next_s: float
    asked_s: float
    at_work: bool = False


class Refused:
    """At most `REFUSED_MAX`; the one that was found first goes for another.

    Args:
        again_s: how often to look again.
        kept_s: for how long after the last request that named it a server is looked at; `always`
            names those that are looked at for ever.

    Reading is for any thread, the rest for those who hold the lock of `PrefillInstances`, but for
    `asked`.
    """

    def __init__(self, again_s: float, kept_s: float, always: frozenset[str] = frozenset()) -> None:
        self._again_s, self._kept_s, self._always = again_s, kept_s, always
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def all(self) -> tuple[RefusedServer, ...]:
        """The one that was found first stands first."""
        return tuple(entry.server for entry in self._entries.copy().values())

    def why(self, address: str) -> Why | None:
        entry = self._entries.get(address)
        return None if entry is None else entry.server.why

    def asked(self, address: str, now_s: float) -> None:
        """A request names it. Costs a look into a table."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.asked_s = now_s

    def note(self, server: RefusedServer, instance: Instance | None, now_s: float) -> bool:
        """Whether that is news: another server, or another reason. Of one life the first reason
        counts: its record and its answer to a hello may say the same in other words."""
        known = self._entries.get(server.address)
        if known is not None:
            is_same_life = instance is not None and known.instance == instance
            if is_same_life or known.server.sentence == server.sentence:
                known.instance = instance
                return False
        if known is None and len(self._entries) >= REFUSED_MAX:
            del self._entries[next(iter(self._entries))]
        asked_s = now_s if known is None else known.asked_s
        self._entries[server.address] = _Entry(server, instance, now_s + self._again_s, asked_s)
        return True

    def clear(self, address: str, instance: Instance) -> bool:
        """The registry serves us, and tells of this life, which fits as far as its record says.
        Whether another one was refused."""
        known = self._entries.get(address)
        if known is None or known.instance == instance:
            return False
        del self._entries[address]
        return True

    def due(self, now_s: float) -> list[str]:
        """Those to look at now; `looked` follows for each. Forgets whom nobody asks for."""
        found = []
        for address, entry in list(self._entries.items()):
            if address not in self._always and now_s - entry.asked_s >= self._kept_s:
                del self._entries[address]
            elif now_s >= entry.next_s and not entry.at_work:
                entry.at_work = True
                found.append(address)
        return found

    def looked(self, address: str, now_s: float) -> bool:
        """It was looked at, whatever came of it. False: it has been forgotten meanwhile."""
        entry = self._entries.get(address)
        if entry is not None:
            entry.at_work, entry.next_s = False, now_s + self._again_s
        return entry is not None
