# SPDX-License-Identifier: Apache-2.0
"""Which object goes first when room is needed. Pure.

An owner tells its policy what is stored, what is read and what is removed for other reasons, and
asks it for a victim. It evicts in the background, some objects at a time, so that a policy is not
told of a capacity: it takes the most objects that there were at once for one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

__all__ = ["POLICIES", "Arc", "Keeping", "Lru", "Policy"]


class Policy(Protocol):
    """Not thread-safe. Each operation takes constant time, about a microsecond."""

    def add(self, key: bytes) -> None:
        """The object is stored now; it was not before."""

    def add_all(self, keys: Sequence[bytes]) -> None:
        """``add`` for each, in order; no key comes twice."""

    def touch(self, key: bytes) -> None:
        """The object was read. It is stored."""

    def remove(self, key: bytes) -> None:
        """The object goes for another reason than room, or must not be evicted from now on. It is
        stored."""

    def evict(self) -> bytes | None:
        """The object that has to go, which is not stored from now on; None if there is none."""

    def __len__(self) -> int:
        """Objects that are stored."""


_Keys = OrderedDict[bytes, None]


class Lru:
    """The least recently used one goes first."""

    def __init__(self) -> None:
        self._keys: _Keys = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: bytes) -> None:
        """See ``Policy``."""
        self._keys[key] = None

    def add_all(self, keys: Sequence[bytes]) -> None:
        """See ``Policy``."""
        self._keys.update(dict.fromkeys(keys))

    def touch(self, key: bytes) -> None:
        """See ``Policy``."""
        self._keys.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """See ``Policy``."""
        del self._keys[key]

    def evict(self) -> bytes | None:
        """See ``Policy``."""
        return self._keys.popitem(last=False)[0] if self._keys else None


class Arc:
    """Adaptive replacement: objects that were used once compete with those that were used again,
    and what was evicted too early shifts the border between the two.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
    whose names for the lists are used here.
    """

    def __init__(self) -> None:
        #: Used once, used again; and the keys that were evicted from each, the oldest first.
        self._t1: _Keys = OrderedDict()
        self._t2: _Keys = OrderedDict()
        self._b1: _Keys = OrderedDict()
        self._b2: _Keys = OrderedDict()
        #: How many of the objects that were used once are to stay.
        self._p = 0.0
        self._capacity = 1

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def add(self, key: bytes) -> None:
        """See ``Policy``."""
        if key in self._b1:
            ratio = len(self._b2) / len(self._b1)
            self._p = min(self._p + max(ratio, 1.0), float(self._capacity))
            del self._b1[key]
            self._t2[key] = None
        elif key in self._b2:
            ratio = len(self._b1) / len(self._b2)
            self._p = max(self._p - max(ratio, 1.0), 0.0)
            del self._b2[key]
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._capacity = max(self._capacity, len(self))
        self._forget()

    def add_all(self, keys: Sequence[bytes]) -> None:
        """See ``Policy``."""
        if self._b1 or self._b2:
            for key in keys:
                self.add(key)
            return
        self._t1.update(dict.fromkeys(keys))  # Nothing was evicted too early.
        self._capacity = max(self._capacity, len(self))

    def touch(self, key: bytes) -> None:
        """See ``Policy``."""
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        else:
            self._t2.move_to_end(key)

    def remove(self, key: bytes) -> None:
        """See ``Policy``."""
        if key in self._t1:
            del self._t1[key]
        else:
            del self._t2[key]

    def evict(self) -> bytes | None:
        """See ``Policy``."""
        from_t1 = bool(self._t1) and (len(self._t1) > self._p or not self._t2)
        stored, evicted = (self._t1, self._b1) if from_t1 else (self._t2, self._b2)
        if not stored:
            return None
        key = stored.popitem(last=False)[0]
        evicted[key] = None
        self._forget()
        return key

    def _forget(self) -> None:
        """At most as many evicted keys as fit, those used once and used again each with their
        share: |T1| + |B1| ≤ c, and 2c in all."""
        while self._b1 and len(self._t1) + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * self._capacity:
            self._b2.popitem(last=False)


class Keeping:
    """A policy that can be told to keep objects: it evicts others until they are released."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._kept: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._policy) + len(self._kept)

    def add(self, key: bytes) -> None:
        """See ``Policy``."""
        self._policy.add(key)

    def add_all(self, keys: Sequence[bytes]) -> None:
        """See ``Policy``."""
        self._policy.add_all(keys)

    def touch(self, key: bytes) -> None:
        """See ``Policy``."""
        if key not in self._kept:
            self._policy.touch(key)

    def remove(self, key: bytes) -> None:
        """See ``Policy``."""
        if key in self._kept:
            self._kept.discard(key)
        else:
            self._policy.remove(key)

    def evict(self) -> bytes | None:
        """See ``Policy``. None, too, if all that are stored are kept."""
        return self._policy.evict()

    def keep(self, key: bytes) -> None:
        """The object, which is stored, is not evicted from now on."""
        self._policy.remove(key)
        self._kept.add(key)

    def release(self, key: bytes) -> None:
        """It may be evicted again, as if it were stored just now."""
        self._kept.remove(key)
        self._policy.add(key)


POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {"arc": Arc, "lru": Lru}
"""By the value of ``Config.policy``."""
