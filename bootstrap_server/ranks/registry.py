# SPDX-License-Identifier: Apache-2.0
"""All instances of a bootstrap server, by name. Pure: the caller (one event loop) passes the time.

An instance comes into being with its first rank, and a named one is forgotten with its last. The
one called `default` is what SGLang's own routes serve. Memory is bounded by the numbers of
instances and of ranks over all of them.

Decode servers are kept for the status page, the metrics, and routers: no rank is ever sent to
one. Their tables are named `decode NAME`, which no prefill server can be called, and have bounds of
their own: however many there are, prefill ranks find room.
"""

from __future__ import annotations

from typing import Final

from bootstrap_server.ranks.errors import RegistryFull
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.records import (
    DEFAULT_INSTANCE,
    RANKS_MAX,
    Rank,
    RankRecord,
    Role,
    check_instance_name,
)

__all__ = [
    "INSTANCES_MAX",
    "LEASE_S",
    "RENEWALS_PER_LEASE",
    "Registry",
    "plain_name",
    "role_of",
]

#: How long a rank lives after its last renewal, and so how long a restarted one may have to wait
#: for its former self's place, where nothing tells sooner that this one has ended (`suspects.py`).
LEASE_S: Final = 15.0
#: A rank may miss two renewals in a row while its interpreter is held.
RENEWALS_PER_LEASE: Final = 3
INSTANCES_MAX: Final = 1024
#: Names of prefill instances have no blanks.
_DECODE: Final = "decode "


class Registry:
    """`first_revision` should grow with every start of a server, so that a revision which a
    client has seen of a former server is never taken for one of this server."""

    def __init__(self, lease_s: float = LEASE_S, first_revision: int = 0) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s is {lease_s}, and a lease must last")
        self.lease_s = lease_s
        self._revision = first_revision
        #: What SGLang's own routes serve.
        self.default = InstanceTable(DEFAULT_INSTANCE, lease_s, first_revision)
        self._tables: dict[str, InstanceTable] = {DEFAULT_INSTANCE: self.default}

    def registered(self, role: Role) -> int:
        """Live ranks of all instances of that role."""
        return sum(table.registered for table in self.of(role))

    def tables(self) -> tuple[InstanceTable, ...]:
        """All instances of both roles, `default` first."""
        return tuple(self._tables.values())

    def of(self, role: Role) -> tuple[InstanceTable, ...]:
        """All instances of that role."""
        return tuple(table for table in self._tables.values() if table.role == role)

    def get(self, name: str, role: Role = "prefill") -> InstanceTable:
        """The instance of that name, an empty one when it has no ranks; `ValueError` for a bad
        name."""
        check_instance_name(name)
        full = name if role == "prefill" else f"{_DECODE}{name}"
        found = self._tables.get(full)
        return InstanceTable(full, self.lease_s, self._revision, role) if found is None else found

    def register(
        self,
        name: str,
        record: RankRecord,
        now_s: float,
        *,
        leased: bool,
        role: Role = "prefill",
    ) -> InstanceTable:
        """Take a rank in (`InstanceTable.register`); returns its instance.

        Raises `RegistryFull` when no more can be kept, `ValueError` for a bad name.
        """
        table = self.get(name, role)
        if table.name not in self._tables and len(self.of(role)) >= INSTANCES_MAX:
            raise RegistryFull(f"this bootstrap server knows {INSTANCES_MAX} instances, its limit")
        if table.find(record.rank.coords) is None and self.registered(role) >= RANKS_MAX:
            raise RegistryFull(f"this bootstrap server knows {RANKS_MAX} live ranks, its limit")
        table.register(record, now_s, leased=leased)
        self._tables[table.name] = table
        return table

    def expire(self, now_s: float) -> list[tuple[str, Rank]]:
        """Drop all ranks whose leases have lapsed, and named instances that have none left."""
        lapsed: list[tuple[str, Rank]] = []
        for name, table in list(self._tables.items()):
            lapsed += ((name, rank) for rank in table.expire(now_s))
            if table.registered == 0 and name != DEFAULT_INSTANCE:
                # Its revisions go on where they end here, should it come back.
                self._revision = max(self._revision, table.revision)
                del self._tables[name]
        return lapsed


def role_of(table_name: str) -> Role:
    """What the ranks of the table of that name do."""
    return "decode" if table_name.startswith(_DECODE) else "prefill"


def plain_name(table_name: str) -> str:
    """What the table's server is called by its ranks, and by who asks for it."""
    return table_name.removeprefix(_DECODE)
