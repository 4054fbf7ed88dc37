# SPDX-License-Identifier: Apache-2.0
"""What was heard lately, bounded in time and number: whoever asks a registry may come to stand on
its status page. Pure: the caller passes the time in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, Protocol, TypeVar

__all__ = ["KEPT_S", "Heard"]

KEPT_S: Final = 600.0


class _Seen(Protocol):
    @property
    def last_s(self) -> float: ...


_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value", bound=_Seen)


class Heard(Generic[_Key, _Value]):
    """What was put in the last `KEPT_S`; of more than `most` the latest."""

    def __init__(self, most: int) -> None:
        self._most = most
        #: The latest stands last.
        self._found: OrderedDict[_Key, _Value] = OrderedDict()

    def get(self, key: _Key) -> _Value | None:
        return self._found.get(key)

    def put(self, key: _Key, value: _Value) -> None:
        """In place of what had that key."""
        self._found[key] = value
        self._found.move_to_end(key)
        if len(self._found) > self._most:
            self._found.popitem(last=False)

    def lately(self, now_s: float) -> list[tuple[_Key, _Value]]:
        """The latest last."""
        while self._found and now_s - next(iter(self._found.values())).last_s >= KEPT_S:
            self._found.popitem(last=False)
        return list(self._found.items())
