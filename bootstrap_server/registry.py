# SPDX-License-Identifier: Apache-2.0
"""Who is there: the ranks of one instance, and which DP rank serves which room.

Pure: no I/O, no clock, no threads. The caller (one event loop) passes the time in.

Rules of registration
1. A record for coordinates that are taken *replaces* the former one; ranks are counted by
   coordinates, so a restarted rank counts once.
2. A record with an older epoch than the one in place is refused: it is a late message of a
   former life. An equal epoch is the same life registering again.
3. A record whose configuration contradicts the live ranks is refused, naming both values,
   unless its epoch is newer than that of *every* live rank. Then the whole instance was
   started again with other flags: a new generation begins and all ranks of the old one are
   dropped. Ranks of the old generation that register later fall under the refusal. (Epochs of
   different hosts are compared here, so clocks must agree better than a restart takes.)
4. Stock SGLang ranks have no epoch (0). They replace each other, but never begin a new
   generation, since nothing tells their restart from a second server with a wrong address.

Leases and several instances come on top of this: `Registry` stays the table of one instance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from bootstrap_server.errors import NotReady, RegistrationRefused
from bootstrap_server.records import (
    Instance,
    InstanceConfig,
    Rank,
    RankCoords,
    RankRecord,
    differences,
)

__all__ = ["Registry", "RoomTable"]

#: How many missing coordinates an answer lists.
MISSING_MAX = 64


class Registry:
    """The live ranks of one instance."""

    def __init__(self) -> None:
        #: None until the first record arrives; afterwards equal for all of `_ranks`.
        self._config: InstanceConfig | None = None
        self._ranks: dict[RankCoords, Rank] = {}
        self._generation = 0
        #: Why the former generation's ranks are gone; shown until the new one is complete.
        self._note: str | None = None

    @property
    def config(self) -> InstanceConfig | None:
        """What the live ranks agree on; None before the first one."""
        return self._config

    @property
    def generation(self) -> int:
        """Number of configurations seen, 0 before the first rank."""
        return self._generation

    @property
    def registered(self) -> int:
        """Number of coordinates that have a live rank."""
        return len(self._ranks)

    @property
    def expected(self) -> int:
        """Number of coordinates of the instance, 0 before the first rank."""
        return 0 if self._config is None else self._config.topology.ranks

    @property
    def ready(self) -> bool:
        """Whether every coordinate has a live rank."""
        return self._config is not None and self.registered == self.expected

    def missing(self, limit: int = MISSING_MAX) -> tuple[RankCoords, ...]:
        """The first `limit` coordinates without a live rank, in ascending order."""
        if self._config is None or self.ready:
            return ()
        absent = (c for c in self._config.topology.coords() if c not in self._ranks)
        return tuple(islice(absent, limit))

    def register(self, record: RankRecord) -> None:
        """Take `record` in, by the rules above; `RegistrationRefused` leaves all as it was."""
        if self._config is None or record.config != self._config:
            self._admit_config(record)
        rank = record.rank
        former = self._ranks.get(rank.coords)
        if former is not None and rank.epoch < former.epoch:
            raise RegistrationRefused(
                f"rank {rank.coords} with epoch {rank.epoch} is a former life: "
                f"epoch {former.epoch} of the same rank has registered since"
            )
        self._ranks[rank.coords] = rank
        if self.ready:
            self._note = None

    def _admit_config(self, record: RankRecord) -> None:
        """Begin a generation with the record's configuration, or refuse the record."""
        if self._config is not None:
            difference = next(differences(self._config, record.config))
            newest = max(rank.epoch for rank in self._ranks.values())
            what = f"{difference.name} {difference.left}"
            if record.rank.epoch <= newest:
                raise RegistrationRefused(
                    f"rank {record.rank.coords} has {difference.name} {difference.right}, but the "
                    f"{self.registered} registered ranks of this instance have {what}; start all "
                    f"ranks of an instance with the same value ({difference.flag})"
                )
            self._note = (
                f"{self.registered} ranks with {what} were replaced when rank "
                f"{record.rank.coords} started later with {difference.name} {difference.right}"
            )
        self._config = record.config
        self._generation += 1
        self._ranks.clear()

    def find(self, coords: RankCoords) -> Rank | None:
        """The live rank at `coords`, if there is one."""
        return self._ranks.get(coords)

    def snapshot(self) -> Instance:
        """The whole instance; `NotReady` until every coordinate has a live rank."""
        if self._config is None or not self.ready:
            raise self.not_ready()
        ranks = tuple(self._ranks[coords] for coords in self._config.topology.coords())
        return Instance(self._config, self._generation, ranks)

    def not_ready(self) -> NotReady:
        """Who is missing, and why as far as known, as an error for the caller to raise."""
        return NotReady(self.registered, self.expected, self.missing(), self._note)


class RoomTable:
    """Which DP rank serves a room, for rooms whose DP rank the router chose freely.

    An entry lives `expiry_s` after its last registration. At most `capacity` rooms are kept;
    the oldest is dropped for a new one, so a flood costs lookups but never memory.
    """

    def __init__(self, capacity: int, expiry_s: float) -> None:
        if capacity < 1 or expiry_s <= 0:
            raise ValueError(f"capacity {capacity} and expiry_s {expiry_s} must be positive")
        self._capacity = capacity
        self._expiry_s = expiry_s
        #: room → (dp rank, time of registration), oldest registration first.
        self._entries: OrderedDict[int, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, room: int, dp_rank: int, now_s: float) -> None:
        """Remember that `dp_rank` serves `room`; a later call for the room replaces it."""
        self._expire(now_s)
        self._entries[room] = (dp_rank, now_s)
        self._entries.move_to_end(room)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def query(self, rooms: Iterable[int], now_s: float) -> dict[int, int]:
        """DP rank per room, for those of `rooms` that are known."""
        self._expire(now_s)
        return {room: self._entries[room][0] for room in rooms if room in self._entries}

    def _expire(self, now_s: float) -> None:
        while self._entries:
            room, (_, registered_s) = next(iter(self._entries.items()))
            if now_s - registered_s < self._expiry_s:
                return
            del self._entries[room]
