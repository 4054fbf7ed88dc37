# SPDX-License-Identifier: Apache-2.0
"""The live ranks of one instance. Pure: no I/O, no clock, no threads; the caller passes the time.

A rank is *live* from its registration until its lease lapses, it is released, or it is replaced.
Stock SGLang ranks (`PUT /route`) know no leases: they live until something replaces them.

Rules of registration
1. Ranks are counted by coordinates, so a restarted rank counts once. The same life (same epoch
   and endpoint) registering again changes nothing but its lease.
2. A live rank that holds a lease gives its place to a newer life *at the same endpoint* only:
   two processes cannot listen on one port, so the former life is gone. From any other endpoint
   the newcomer is told to wait (`PlaceTaken`) until the lease ends, which happens within one
   lease after a crash, and never while the former life renews. That is how a second server which
   was started with the address of this one is told from a restart. The caller may end a lease
   sooner (`end`) when it knows that the process has ended (`suspects.py`).
3. A record whose configuration contradicts the live ranks is refused, naming both values. While
   one of them holds a lease this too is `PlaceTaken`; when they have all gone, or cannot tell
   that they are alive and the newcomer can, a new generation of the instance begins.
4. Stock ranks replace each other at the same coordinates, but never begin a generation over live
   ranks, since nothing tells their restart from a second server with a wrong address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from bootstrap_server.ranks.errors import (
    LeaseLost,
    NotReady,
    PlaceTaken,
    RegistrationRefused,
)
from bootstrap_server.ranks.records import (
    DEFAULT_INSTANCE,
    Difference,
    Instance,
    InstanceConfig,
    Rank,
    RankCoords,
    RankRecord,
    Role,
    differences,
)

__all__ = ["InstanceTable"]

#: How many missing coordinates an answer lists.
MISSING_MAX = 64


class _Gone(NamedTuple):
    """A rank that was live, and why it no longer is."""

    rank: Rank
    why: str


class InstanceTable:
    """See the module's rules. Every lease lasts `lease_s` from its last renewal. `role` is what its
    ranks do; `name` tells it from all others of a registry.

    `revision` grows with every change of who is live or of the configuration, beginning above
    `first_revision`.
    """

    def __init__(
        self, name: str, lease_s: float, first_revision: int = 0, role: Role = "prefill"
    ) -> None:
        self.name, self.role = name, role
        self.lease_s = lease_s
        self.revision = first_revision
        #: Number of configurations seen, 0 before the first rank.
        self.generation = 0
        #: What the live ranks agree on (or did, when there are none left); None at first.
        self.config: InstanceConfig | None = None
        self._ranks: dict[RankCoords, Rank] = {}
        #: Time of the last renewal, longest ago first; stock ranks are not in it.
        self._renewed_s: OrderedDict[RankCoords, float] = OrderedDict()
        #: Some of those that are missing, for the sentence that says so.
        self._gone: dict[RankCoords, _Gone] = {}
        #: Why the former generation's ranks are gone; shown until the new one is complete.
        self._note: str | None = None

    # --- what is asked ---

    @property
    def registered(self) -> int:
        """Number of coordinates that have a live rank."""
        return len(self._ranks)

    @property
    def expected(self) -> int:
        """Number of coordinates of the instance, 0 before the first rank."""
        return 0 if self.config is None else self.config.topology.ranks

    @property
    def ready(self) -> bool:
        """Whether every coordinate has a live rank."""
        return self.config is not None and self.registered == self.expected

    def find(self, coords: RankCoords) -> Rank | None:
        """The live rank at `coords`, if there is one."""
        return self._ranks.get(coords)

    def live(self) -> Iterator[tuple[Rank, float | None]]:
        """The live ranks, each with the time of its last renewal; None for stock ranks."""
        for coords, rank in self._ranks.items():
            yield rank, self._renewed_s.get(coords)

    def missing(self, limit: int = MISSING_MAX) -> tuple[RankCoords, ...]:
        """The first `limit` coordinates without a live rank, in ascending order."""
        if self.config is None or self.ready:
            return ()
        absent = (c for c in self.config.topology.coords() if c not in self._ranks)
        return tuple(islice(absent, limit))

    def snapshot(self) -> Instance:
        """The whole instance; `NotReady` until every coordinate has a live rank."""
        if self.config is None or not self.ready:
            raise self.not_ready()
        ranks = tuple(self._ranks[coords] for coords in self.config.topology.coords())
        return Instance(self.config, self.generation, ranks, self.revision)

    def not_ready(self) -> NotReady:
        """Who is missing, and why as far as known, as an error for the caller to raise."""
        missing = self.missing()
        gone = next((self._gone[coords] for coords in missing if coords in self._gone), None)
        note = self._note
        if gone is not None:
            rank = gone.rank
            note = f"rank {rank.coords} was at {rank.host} port {rank.port} and {gone.why}"
        name = None if self.name == DEFAULT_INSTANCE else self.name
        return NotReady(self.registered, self.expected, missing, note, name)

    # --- what ranks say ---

    def register(self, record: RankRecord, now_s: float, *, leased: bool) -> None:
        """Take `record` in, by the rules above; a refusal leaves all as it was."""
        self.expire(now_s)
        rank = record.rank
        if record.config == self.config:
            self._check_place(rank, now_s)
        else:
            self._admit_config(record, now_s)
        if self._ranks.get(rank.coords) != rank:
            self._ranks[rank.coords] = rank
            self._gone.pop(rank.coords, None)
            self.revision += 1
        if leased:
            self._touch(rank.coords, now_s)
        else:
            self._renewed_s.pop(rank.coords, None)
        if self.ready:
            self._note = None
            self._gone.clear()

    def renew(self, coords: RankCoords, epoch: int, now_s: float) -> None:
        """Prolong the lease of one life of a rank; `LeaseLost` when it holds none (any more)."""
        self.expire(now_s)
        self._check_life(coords, epoch)
        self._touch(coords, now_s)

    def release(self, coords: RankCoords, epoch: int, now_s: float) -> None:
        """End the lease of one life of a rank at once; `LeaseLost` when it holds none."""
        self.expire(now_s)
        self._check_life(coords, epoch)
        self._drop(coords, "has been shut down")

    def end(self, coords: RankCoords) -> None:
        """End the lease of a rank of which is known that its process has ended."""
        self._drop(coords, "has ended: nothing listens on its port")

    def expire(self, now_s: float) -> list[Rank]:
        """Drop ranks whose leases have lapsed, and return them; free when there are none."""
        lapsed: list[Rank] = []
        while self._renewed_s:
            coords, renewed_s = next(iter(self._renewed_s.items()))
            if now_s - renewed_s < self.lease_s:
                break
            lapsed.append(self._ranks[coords])
            self._drop(coords, f"has not renewed its lease of {self.lease_s:g} s")
        return lapsed

    # --- inside ---

    def _touch(self, coords: RankCoords, now_s: float) -> None:
        self._renewed_s[coords] = now_s
        self._renewed_s.move_to_end(coords)

    def _drop(self, coords: RankCoords, why: str) -> None:
        if len(self._gone) < MISSING_MAX:
            self._gone[coords] = _Gone(self._ranks[coords], why)
        del self._ranks[coords], self._renewed_s[coords]
        self.revision += 1

    def _check_life(self, coords: RankCoords, epoch: int) -> None:
        live = self._ranks.get(coords)
        if live is None or coords not in self._renewed_s:
            raise LeaseLost(f"rank {coords} has no lease: it must register again")
        if live.epoch != epoch:
            raise LeaseLost(
                f"rank {coords} with epoch {epoch} has no lease: epoch {live.epoch} of it, at "
                f"{live.host} port {live.port}, has taken its place"
            )

    def _lease_left_s(self, coords: RankCoords, now_s: float) -> float:
        return self._renewed_s[coords] + self.lease_s - now_s

    def _check_place(self, rank: Rank, now_s: float) -> None:
        """Rules 1, 2 and 4, for coordinates that may be taken."""
        live = self._ranks.get(rank.coords)
        if live is None or rank == live:
            return
        if _endpoint(rank) == _endpoint(live):
            if rank.epoch < live.epoch:
                raise RegistrationRefused(
                    f"rank {rank.coords} with epoch {rank.epoch} belongs to a process that has "
                    "been replaced: epoch "
                    f"{live.epoch} of the same rank has registered since, from the same endpoint"
                )
            return
        if rank.coords not in self._renewed_s:
            return
        left_s = self._lease_left_s(rank.coords, now_s)
        raise PlaceTaken(
            f"rank {rank.coords} of {_instance(self.name)} is alive at {live.host} port "
            f"{live.port} and not replaced by the one at {rank.host} port {rank.port}: give a "
            "second prefill server a bootstrap address of its own "
            "(--disaggregation-bootstrap-port, --dist-init-addr); a restarted one gets the place "
            f"when the former lease ends, in {left_s:.1f} s",
            left_s,
        )

    def _admit_config(self, record: RankRecord, now_s: float) -> None:
        """Begin a generation with the record's configuration, or refuse the record (rule 3)."""
        rank = record.rank
        if self.config is not None and self._ranks:
            difference = next(differences(self.config, record.config))
            self._check_contradiction(rank, difference, now_s)
            self._note = (
                f"{self.registered} ranks with {difference.name} {difference.left} were replaced "
                f"when rank {rank.coords} started later with {difference.name} {difference.right}"
            )
        self.config = record.config
        self.generation += 1
        self.revision += 1
        self._ranks.clear()
        self._renewed_s.clear()
        self._gone.clear()

    def _check_contradiction(self, rank: Rank, difference: Difference, now_s: float) -> None:
        sentence = (
            f"rank {rank.coords} has {difference.name} {difference.right}, but the "
            f"{self.registered} registered ranks of {_instance(self.name)} have {difference.name} "
            f"{difference.left}; start all ranks of an instance with the same value "
            f"({difference.flag})"
        )
        holders = [
            coords
            for coords in self._renewed_s
            if _endpoint(self._ranks[coords]) != _endpoint(rank)
        ]
        if holders:
            # The last renewal of all is the one that ends last.
            left_s = self._lease_left_s(holders[-1], now_s)
            raise PlaceTaken(
                f"{sentence}; a server that was restarted with other flags gets the place when "
                f"the last of their leases ends, in {left_s:.1f} s",
                left_s,
            )
        if rank.epoch <= max(live.epoch for live in self._ranks.values()):
            raise RegistrationRefused(sentence)


def _endpoint(rank: Rank) -> tuple[str, int]:
    return rank.host, rank.port


def _instance(name: str) -> str:
    return "this instance" if name == DEFAULT_INSTANCE else f"instance {name}"
