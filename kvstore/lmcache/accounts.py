# SPDX-License-Identifier: Apache-2.0
"""Which of LMCache's objects this process has stored, and how large they are. Pure.

The store knows objects by digests, from which no key of LMCache's follows. LMCache keeps quotas by
what an adapter tells it of keys, so they are kept here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Account", "Accounts", "ObjectSpec"]


class ObjectSpec(NamedTuple):
    """What an object was stored with: see ``Store.exists``."""

    signature: bytes
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """One object. It is replaced when the object is stored again.

    number: of its key, in the order in which keys were first stored.
    digest: the store's key.
    since_s: when it was stored last.
    """

    number: int
    digest: bytes
    spec: ObjectSpec
    since_s: float


class Accounts:
    """By LMCache's key. Not thread-safe."""

    def __init__(self) -> None:
        self._accounts: dict[Any, Account] = {}  # In the order of their numbers.
        self._numbers = itertools.count(1)
        #: Keys whose turn to be looked at is still to come.
        self._unseen: list[Any] = []

    def __len__(self) -> int:
        return len(self._accounts)

    def add(self, key: Any, digest: bytes, spec: ObjectSpec, now_s: float) -> Account | None:
        """The object is stored; returns what was known of it before."""
        before = self._accounts.get(key)
        number = next(self._numbers) if before is None else before.number
        self._accounts[key] = Account(number, digest, spec, now_s)
        return before

    def of(self, keys: Sequence[Any]) -> dict[Any, Account]:
        """Of those keys that are known."""
        return {key: one for key in keys if (one := self._accounts.get(key)) is not None}

    def drop(self, gone: Mapping[Any, Account]) -> dict[Any, Account]:
        """These are not stored any more; returns those that were not stored again meanwhile, which
        are not known from now on."""
        dropped = {key: one for key, one in gone.items() if self._accounts.get(key) is one}
        for key in dropped:
            del self._accounts[key]
        return dropped

    def next_to_see(self, count: int, before_s: float) -> dict[Any, Account]:
        """So many at most, in turn, that were stored last before a time: the caller sees whether
        they are still there."""
        found: dict[Any, Account] = {}
        for _ in range(min(count, len(self._accounts))):
            if not self._unseen:
                self._unseen = list(reversed(self._accounts))
            key = self._unseen.pop()
            one = self._accounts.get(key)
            if one is not None and one.since_s < before_s:
                found[key] = one
        return found

    def page(
        self, model_name: str | None, count: int, after: int
    ) -> tuple[list[tuple[Any, int]], int | None]:
        """So many keys at most, of one model or of all, with their sizes in bytes, whose numbers
        are above ``after``; and after which number the next ones come, None if there are none."""
        wanted = (
            (one.number, key, one.spec.nbytes)
            for key, one in self._accounts.items()
            if one.number > after and model_name in (None, key.model_name)
        )
        some = list(itertools.islice(wanted, count + 1))
        following = some[count - 1][0] if len(some) > count else None
        return [(key, nbytes) for _, key, nbytes in some[:count]], following
