# SPDX-License-Identifier: Apache-2.0
"""Loads pages of several pools together, in the order in which the model uses their layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self

from kvstore.objects.outcomes import Got
from kvstore.store import StillLanding

__all__ = ["LayerLoads", "PoolLoad", "ranges"]


class Loading(Protocol):
    """What is used of ``kvstore.loading.Load``; see there."""

    def begin(self, first: int, end: int) -> None:
        """Begins to read some pieces of all objects."""

    def wait(self, part: int) -> bool:
        """Waits for a part, by its number."""

    def finish(self) -> list[Got]:
        """An outcome for each object."""

    def cancel(self) -> None:
        """Nothing lands any more."""


def ranges(layers: int, step: int) -> list[tuple[int, int]]:
    """The first layer of each read and the one behind its last, of so many layers."""
    return [(first, min(first + step, layers)) for first in range(0, layers, step)]


class PoolLoad:
    """The pages of one pool, which has some of the model's layers."""

    def __init__(self, name: str, load: Loading, layers: Sequence[int], pieces: int) -> None:
        """``layers``: their numbers in the model, ascending. ``pieces``: of each layer of a
        page."""
        self.name = name
        self._load = load
        self._layers = layers
        self._pieces = pieces
        self._waited = 0

    def begin(self, first: int, end: int) -> None:
        """Begins to read those layers of the model from ``first`` to before ``end`` that it has."""
        own_first, own_end = self._own(first, end)
        if own_first < own_end:
            self._load.begin(own_first * self._pieces, own_end * self._pieces)

    def wait(self, first: int, end: int) -> None:
        """Waits for what ``begin`` has begun, in the same order; ``LookupError`` if a page is not
        right, apart from its checksum."""
        own_first, own_end = self._own(first, end)
        if own_first < own_end:
            part, self._waited = self._waited, self._waited + 1
            if not self._load.wait(part):
                raise LookupError(self._told(self._load.finish()))

    def finish(self) -> None:
        """After all were waited for; ``LookupError`` if a page is not right."""
        outcomes = self._load.finish()
        if any(one is not Got.RIGHT for one in outcomes):
            raise LookupError(self._told(outcomes))

    def cancel(self) -> None:
        """Nothing lands any more. Without effect after ``finish``."""
        self._load.cancel()

    def _told(self, outcomes: Sequence[Got]) -> str:
        wrong = [one.value for one in outcomes if one is not Got.RIGHT]
        return (
            f"{len(wrong)} of {len(outcomes)} pages of the pool {self.name} did not come:"
            f" {', '.join(sorted(set(wrong)))}"
        )

    def _own(self, first: int, end: int) -> tuple[int, int]:
        return bisect_left(self._layers, first), bisect_left(self._layers, end)


class LayerLoads:
    """One batch; the pools' loads together have every layer once. A context manager: nothing lands
    any more behind it, however long that takes. ``StillLanding`` if reads did not stop in time."""

    def __init__(self, loads: Sequence[PoolLoad], layers: int, step: int) -> None:
        """``layers``: of the model. ``step``: how many of them one read brings."""
        self._loads = loads
        self._ranges = ranges(layers, step)
        self._last = layers - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        going_on = [exc] if isinstance(exc, StillLanding) else []
        for one in self._loads:
            try:
                one.cancel()
            except StillLanding as stuck:
                going_on.append(stuck)
        for each in going_on:
            each.wait()  # SGLang uses the pages of requests that it aborts again.
        if going_on:
            raise going_on[0]

    def layers(self) -> Iterator[int]:
        """Loads everything, and yields each layer when it may be used: the last one after all pages
        were found to be right, checksums included. ``LookupError`` if one is not."""
        for first, end in self._ranges:
            for one in self._loads:
                one.begin(first, end)
        for first, end in self._ranges:
            for one in self._loads:
                one.wait(first, end)
            yield from range(first, min(end, self._last))
        for one in self._loads:
            one.finish()
        yield self._last
