# SPDX-License-Identifier: Apache-2.0
"""What was removed lately, so that nobody brings it back who reads it from another owner at that
time. Pure.

Who removes an object asks all owners, and waits a while for them. Until then one of them may have
it still, and another one, which was asked before, may read it from there."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from kvstore.objects.changes import KEY_BYTES

__all__ = ["NAMES_MAX", "Removals"]

NAMES_MAX: Final = 1 << 15
"""So many removals are remembered one by one."""


class Removals:
    """Not thread-safe."""

    def __init__(self, names_max: int = NAMES_MAX) -> None:
        self._names_max = names_max
        #: When names and signatures were removed the last time, the oldest first.
        self._at_s: OrderedDict[bytes, float] = OrderedDict()
        #: When the last one was that is not remembered by its name any more.
        self._forgotten_s = -math.inf

    def add(self, names: Iterable[bytes], now_s: float) -> None:
        """Objects were removed: keys with signatures; or all of a signature, by that alone."""
        for name in names:
            self._at_s[name] = now_s
            self._at_s.move_to_end(name)
        while len(self._at_s) > self._names_max:
            _, self._forgotten_s = self._at_s.popitem(last=False)

    def has(self, name: bytes, since_s: float) -> bool:
        """Whether an object was removed at that time or later, or may have been."""
        last_s = max(
            self._forgotten_s,
            self._at_s.get(name, -math.inf),
            self._at_s.get(name[KEY_BYTES:], -math.inf),
        )
        return last_s >= since_s
