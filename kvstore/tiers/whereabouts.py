# SPDX-License-Identifier: Apache-2.0
"""Which of two tiers has an object, and what is to be copied from the upper to the lower. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.tiers.base import Found

__all__ = ["Turn", "Whereabouts"]

#: Bits of where an object is.
_UPPER: Final = 1
_LOWER: Final = 2
#: It is being copied to the lower tier.
_COPYING: Final = 4
#: What is being copied was removed meanwhile: the next turn removes it from the lower tier.
_UNWANTED: Final = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be done next at the lower tier, in this order."""

    #: Names to be removed.
    unwanted: Sequence[bytes]
    #: Names and sizes of what is to be copied; give the outcomes to ``copied``.
    copies: Sequence[tuple[bytes, int]]


class Whereabouts:
    """Objects by name. Not thread-safe."""

    def __init__(self) -> None:
        self._where: dict[bytes, int] = {}
        #: What is to be copied, with its size; all of it is in the upper tier.
        self._waiting: dict[bytes, int] = {}
        self.waiting_bytes = 0
        self._unwanted: dict[bytes, None] = {}
        self._gone: list[bytes] = []

    def __len__(self) -> int:
        """Objects that are in a tier or in both."""
        return len(self._where)

    @property
    def has_unwanted(self) -> bool:
        """Whether something is to be removed from the lower tier."""
        return bool(self._unwanted)

    @property
    def has_waiting(self) -> bool:
        """Whether something is to be copied."""
        return bool(self._waiting)

    def found(self, upper: Sequence[Found], lower: Sequence[Found]) -> list[Found]:
        """Both tiers have been taken over. Returns what they have together."""
        for one in lower:
            self._where[one.name] = _LOWER
        for one in upper:
            self.stored(one.name, one.nbytes)
        alone = [one for one in lower if not self._where[one.name] & _UPPER]
        return [*upper, *alone]

    def is_in_upper(self, name: bytes) -> bool:
        """Whether it is to be read from there."""
        return bool(self._where.get(name, 0) & _UPPER)

    def is_in_lower(self, name: bytes) -> bool:
        """Whether it can be read from there."""
        return bool(self._where.get(name, 0) & _LOWER)

    def is_in_lower_tier(self, name: bytes) -> bool:
        """Whether it is in the lower tier alone."""
        return self._where.get(name, 0) == _LOWER

    # -- the tiers

    def stored(self, name: bytes, nbytes: int) -> None:
        """It was written to the upper tier."""
        where = self._where.get(name, 0) | _UPPER
        self._where[name] = where
        if not where & (_LOWER | _COPYING):
            self._wait(name, nbytes)

    def left_upper(self, names: Iterable[bytes]) -> None:
        """They are not in the upper tier any more. Those that are nowhere then are ``gone``."""
        for name in names:
            self._dont_wait(name)
            self._leave(name, _UPPER)

    def left_lower(self, names: Iterable[bytes]) -> None:
        """They are not in the lower tier any more. They are not copied again."""
        for name in names:
            self._leave(name, _LOWER)

    def _leave(self, name: bytes, tier: int) -> None:
        where = self._where.get(name, 0)
        if not where & tier:
            return
        where &= ~tier
        self._where[name] = where
        copied = where & _COPYING and not where & _UNWANTED
        if not where & (_UPPER | _LOWER) and not copied:
            self._gone.append(name)
            self._forget(name)

    def gone(self) -> list[bytes]:
        """The names of objects that are in neither tier since the last call."""
        gone, self._gone = self._gone, []
        # One that was written once more since is there.
        return [name for name in gone if not self._where.get(name, 0) & (_UPPER | _LOWER)]

    def remove(self, names: Iterable[bytes]) -> None:
        """They are removed from the upper tier. ``turn`` has them removed from the lower one."""
        for name in names:
            self._dont_wait(name)
            self._unwanted[name] = None
            self._forget(name)

    def _forget(self, name: bytes) -> None:
        if self._where.get(name, 0) & _COPYING:
            self._where[name] = _COPYING | _UNWANTED
        else:
            self._where.pop(name, None)

    # -- copies to the lower tier

    def turn(self, objects_max: int, bytes_max: int) -> Turn:
        """What to do; one object may have more bytes than that."""
        unwanted = list(self._unwanted)
        self._unwanted.clear()
        copies: list[tuple[bytes, int]] = []
        total = 0
        for name, nbytes in self._waiting.items():
            if len(copies) == objects_max or (copies and total + nbytes > bytes_max):
                break
            copies.append((name, nbytes))
            total += nbytes
        for name, _ in copies:
            self._dont_wait(name)
            self._where[name] |= _COPYING
        return Turn(unwanted, copies)

    def copied(self, name: bytes, nbytes: int, *, is_stored: bool, again: bool = False) -> None:
        """A copy has ended. ``again``: try it once more if it failed."""
        where = self._where[name] & ~(_COPYING | _UNWANTED)
        is_wanted = not self._where[name] & _UNWANTED  # Else the next turn removes it.
        if is_wanted and is_stored:
            where |= _LOWER
        self._where[name] = where
        if not where:
            del self._where[name]
            if is_wanted:
                self._gone.append(name)
        elif where == _UPPER and (again or not is_wanted):
            self._wait(name, nbytes)

    def _wait(self, name: bytes, nbytes: int) -> None:
        self._dont_wait(name)
        self._waiting[name] = nbytes
        self.waiting_bytes += nbytes

    def _dont_wait(self, name: bytes) -> None:
        self.waiting_bytes -= self._waiting.pop(name, 0)
