# SPDX-License-Identifier: Apache-2.0
"""Tests that take turns: each run has one part of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["PARTS", "Turn", "pick_of_commit"]

#: How many runs have each of these tests once, if commits were as even as their hashes.
PARTS = 3


def pick_of_commit(commit: str) -> int:
    """Which one of each set of tests a run of this commit has. Small, so that it can be read."""
    return int(commit, 16) // PARTS % 1000


@dataclass(frozen=True)
class Turn:
    """The ``number``-th of ``parts``, from 1."""

    number: int
    parts: int = PARTS

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.parts:
            raise ValueError(f"turn {self}: the first number is from 1 to the second")

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    @classmethod
    def parse(cls, text: str) -> Turn:
        """Of "K/N"."""
        number, _, parts = text.partition("/")
        return cls(int(number), int(parts))

    @classmethod
    def of_commit(cls, commit: str) -> Turn:
        """The turn of a commit, which its hexadecimal hash decides."""
        return cls(int(commit, 16) % PARTS + 1)

    def choose(self, groups: Iterable[str]) -> set[str]:
        """Those whose turn it is: every ``parts``-th in the order of their names. Neighbours, which
        often cost alike, are so in different parts."""
        return set(sorted(set(groups))[self.number - 1 :: self.parts])
