# SPDX-License-Identifier: Apache-2.0
"""The links that other engines have opened into this one, by what they are called; and what is
asked of a peer that this engine has opened a link to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from te.transports.base import IncomingLink, LinkKey

__all__ = ["Described", "Links"]


class Described(Protocol):
    """``te.peers.Peer``."""

    def describe(self, code: int, errnum: int, text: str) -> str:
        """The sentence for what the plane reports of its link."""


class Links:
    """Each is found by its key, and by the identifier of its session key. Not for several threads
    at once."""

    def __init__(self) -> None:
        self._by_key: dict[LinkKey, IncomingLink] = {}
        self._by_session: dict[bytes, IncomingLink] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[IncomingLink]:
        return iter(self._by_key.values())

    def get(self, key: LinkKey) -> IncomingLink | None:
        """The one of that key."""
        return self._by_key.get(key)

    def of_session(self, session: bytes) -> IncomingLink | None:
        """The one whose session key has that identifier."""
        return self._by_session.get(session)

    def add(self, link: IncomingLink) -> None:
        """Adds a link with a session key; adding it again changes nothing."""
        assert link.session is not None
        self._by_key[link.key] = link
        self._by_session[link.session.id] = link

    def take(self, number: int) -> IncomingLink | None:
        """Forgets the one of that number of the plane's, and returns it."""
        for link in self:
            if link.handle.number == number:
                self._remove(link)
                return link
        return None

    def forget_dead(self) -> None:
        """Forgets links that have ended."""
        for link in tuple(self):
            if not link.handle.alive:
                self._remove(link)

    def _remove(self, link: IncomingLink) -> None:
        assert link.session is not None
        del self._by_key[link.key], self._by_session[link.session.id]
