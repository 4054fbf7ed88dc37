# SPDX-License-Identifier: Apache-2.0
"""Which pages a server's cache has, as far as it is known. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

__all__ = ["KnownPages", "first_of"]


class KnownPages:
    """Names of pages, of which there are ``pages_max`` at most: those that were named the longest
    time ago go first."""

    def __init__(self, pages_max: int) -> None:
        self._pages_max = pages_max
        self._names: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Sequence[int]) -> None:
        """The pages of a prompt, from its beginning. The last ones are to go before the first ones,
        without which they would be worth nothing."""
        known = self._names
        for name in reversed(names[: self._pages_max]):
            if name in known:
                known.move_to_end(name)
            else:
                known[name] = None
        while len(known) > self._pages_max:
            known.popitem(last=False)

    def clear(self) -> None:
        self._names.clear()

    def first_of(self, names: Sequence[int]) -> int:
        """How many of ``names``, from the first on, are there without a gap."""
        return first_of(self._names, names)


def first_of(known: Container[int], names: Sequence[int]) -> int:
    """How many of ``names``, from the first on, are ``known`` without a gap."""
    for at, name in enumerate(names):
        if name not in known:
            return at
    return len(names)
