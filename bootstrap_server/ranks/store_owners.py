# SPDX-License-Identifier: Apache-2.0
"""Where the owners of a store are that meet at this registry. Pure: the caller passes the time in.

An owner renews its entry again and again, and is told of all entries whenever they have changed.
The registry does not read them: they are between owners, who prove themselves to each other.
"""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple

import msgspec

from bootstrap_server.ranks.errors import RegistryFull

__all__ = ["KEPT_S_MAX", "STORE_OWNERS_PATH", "EntryOf", "StoreEntries", "StoreOwners"]

STORE_OWNERS_PATH: Final = "/v1/store-owners"
OWNERS_MAX: Final = 4_096
"""Four times as many as a store has: one that was killed stays until its time is over."""

KEPT_S_MAX: Final = 3_600

_Name = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class EntryOf(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner, or who wants to find one, sends.

    `entry` is the own one of the owner of that `name`, and is renewed for `kept_s` seconds. Who has
    none looks for others only. `known` is the revision of the entries that it has; 0: none.
    """

    name: _Name | None = None
    entry: Annotated[str, msgspec.Meta(max_length=256, pattern="^[ -~]*$")] = ""
    kept_s: Annotated[float, msgspec.Meta(ge=1, le=KEPT_S_MAX)] = 10.0
    known: Annotated[int, msgspec.Meta(ge=0)] = 0


class StoreEntries(msgspec.Struct, frozen=True):
    """What it is told. `entries` is None if they are those of the revision that it knows."""

    revision: Annotated[int, msgspec.Meta(ge=0)]
    entries: list[str] | None = None


class _Kept(NamedTuple):
    entry: str
    until_s: float


class StoreOwners:
    """By name, `OWNERS_MAX` at most. Revisions count from `first_revision`, which grows with every
    start of a registry, so that what a former one has said is no revision of this one."""

    def __init__(self, first_revision: int = 0) -> None:
        self.revision = first_revision + 1
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def exchange(self, said: EntryOf, now_s: float) -> StoreEntries:
        """Renews an entry, and forgets those that were not renewed.

        Raises:
            RegistryFull: there are `OWNERS_MAX` others.
        """
        self._forget(now_s)
        if said.name is not None and said.entry:
            self._keep(said.name, _Kept(said.entry, now_s + said.kept_s))
        if said.known == self.revision:
            return StoreEntries(self.revision)
        return StoreEntries(self.revision, [one.entry for one in self._kept.values()])

    def leave(self, name: str) -> None:
        """Takes an owner out, if it is there."""
        if self._kept.pop(name, None) is not None:
            self.revision += 1

    def _keep(self, name: str, one: _Kept) -> None:
        former = self._kept.pop(name, None)
        if former is None and len(self._kept) >= OWNERS_MAX:
            raise RegistryFull(f"{OWNERS_MAX} owners of a store are registered here already")
        self._kept[name] = one
        if former is None or former.entry != one.entry:
            self.revision += 1

    def _forget(self, now_s: float) -> None:
        late = [name for name, one in self._kept.items() if one.until_s < now_s]
        for name in late:
            self.leave(name)
