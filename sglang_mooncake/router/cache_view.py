# SPDX-License-Identifier: Apache-2.0
"""A server's cache, as the server itself tells of it. Pure: the time is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from sglang_mooncake.router.kv_events import EventStream

__all__ = ["CacheView", "Named"]


class Named(Protocol):
    """A prompt whose pages have the names of servers' events (``placement.Look``)."""

    def event_names(self, page_size: int) -> Sequence[int] | None:
        """None if they cannot be known."""


class CacheView:
    """The cache of one server, or of one of its DP ranks."""

    def __init__(self, owner: object, rank: int = 0, ranks: int = 1) -> None:
        """``owner``: as the log names it; ``rank``: which of its ``ranks`` it is."""
        self._owner = owner
        self.rank: Final = rank
        self.ranks: Final = ranks
        #: Tokens of a page of its; 0 while it has not told.
        self.page_size = 0
        self._events: EventStream | None = None
        self._event_page = 0

    def __repr__(self) -> str:
        return str(self._owner) if self.ranks == 1 else f"DP rank {self.rank} of {self._owner}"

    def follow(self, events: EventStream | None, page_size: int) -> None:
        """The server tells of its pages by itself, each of so many tokens; None: no more."""
        self._events, self._event_page = events, page_size

    @property
    def events(self) -> EventStream | None:
        """What the server tells of its pages, if it does."""
        return self._events

    @property
    def event_page(self) -> int:
        """How many tokens a page has that the server tells of."""
        return self._event_page

    def is_begun(self, look: Named) -> bool | None:
        """Whether its events have named the prompt's first page; None as for ``told_tokens``."""
        names = None if self._events is None else look.event_names(self._event_page)
        if self._events is None or not names:
            return None
        return self._events.first_of(names[:1]) > 0

    def told_tokens(self, look: Named, now_s: float) -> float | None:
        """How many tokens of a prompt's beginning the cache has, by its events; None while they do
        not come, and for a prompt whose pages they do not name."""
        if self._events is None or self._events.state(now_s) != "live":
            return None
        names = look.event_names(self._event_page)
        return None if names is None else self._events.first_of(names) * self._event_page
