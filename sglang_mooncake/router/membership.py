# SPDX-License-Identifier: Apache-2.0
"""Which servers the router has, where registries tell of them. Pure: the caller tells the time.

Servers that the command line names stay. One that a registry lists joins. One that no registry
lists any more leaves once it is ill as well: a registry that was started again, or whose ranks lost
their leases for a moment, does not end a server that answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from sglang_mooncake.router.addresses import Place, host_key, place_of
from sglang_mooncake.router.servers import Role, Server, Servers

__all__ = ["ABSENT_S", "Change", "Listed", "Membership"]

#: A server that answers and is listed nowhere leaves after so long: four leases of its ranks.
ABSENT_S: Final = 60.0


class _Record(NamedTuple):
    role: Role
    bootstrap_port: int | None
    bootstrap_host: str | None

    def may_be_of(self, other: _Record) -> bool:
        """Whether both may be of one process: its host may have several addresses."""
        return self[:2] == other[:2]


class Listed(NamedTuple):
    """A server as a registry lists it. The last two are of a prefill server's own registry."""

    role: Role
    url: str
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None

    @property
    def record(self) -> _Record:
        """What it is, however it is spelled."""
        host = self.bootstrap_host
        return _Record(self.role, self.bootstrap_port, None if host is None else host_key(host))


class Change(NamedTuple):
    """Servers that have come and gone, and sentences about those that cannot be taken."""

    joined: tuple[Server, ...]
    left: tuple[Server, ...]
    refused: tuple[str, ...]


class _Joined(NamedTuple):
    """A server, what it was listed as when it joined, and the registry that says so."""

    server: Server
    record: _Record
    registry: str


class Membership:
    """Changes ``servers``. A server is the same under all spellings of its URL."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._named: Final = {place_of(one.url): one for one in servers.all()}
        #: By registry, what it has listed last; the first one that lists a server counts.
        self._listed: dict[str, tuple[Listed, ...]] = {}
        self._joined: dict[Place, _Joined] = {}
        self._absent_since_s: dict[Place, float] = {}
        self._refused: set[str] = set()

    def told(self, registry: str, listed: Sequence[Listed]) -> None:
        """What a registry lists now, in place of what it has listed before."""
        self._listed[registry] = tuple(listed)

    def settle(self, now_s: float) -> Change:
        """Lets servers join and leave by all that was told."""
        wanted = self._wanted()
        gone = [
            place for place in self._joined if not self._stays(place, wanted.get(place, {}), now_s)
        ]
        former = {place: self._joined[place].registry for place in gone}
        left = [self._remove(place) for place in gone]
        joined = []
        for place, by_registry in wanted.items():
            if place not in self._named and place not in self._joined:
                registry = former.get(place)
                if registry not in by_registry:
                    registry = next(iter(by_registry))
                joined.append(self._join(place, by_registry[registry][0], registry, now_s))
        refused = list(self._contradictions(wanted))
        news = tuple(one for one in refused if one not in self._refused)
        self._refused = set(refused)
        return Change(tuple(joined), tuple(left), news)

    def _wanted(self) -> dict[Place, dict[str, list[Listed]]]:
        """By server and registry, as what it is listed."""
        wanted: dict[Place, dict[str, list[Listed]]] = {}
        for registry, every in self._listed.items():
            for one in every:
                by_registry = wanted.setdefault(place_of(one.url), {})
                by_registry.setdefault(registry, []).append(one)
        return wanted

    def _stays(self, place: Place, by_registry: dict[str, list[Listed]], now_s: float) -> bool:
        """Whether one that has joined is still the same, and there. What the registry says by which
        it has joined counts first. Another may know it by another address of its host, which is no
        reason to let it go."""
        joined = self._joined[place]
        records = {
            registry: [one.record for one in every] for registry, every in by_registry.items()
        }
        if joined.record not in records.get(joined.registry, [joined.record]):
            return False  # Started again.
        says_so = [registry for registry, every in records.items() if joined.record in every]
        if says_so:
            if joined.registry not in says_so:
                self._joined[place] = joined._replace(registry=says_so[0])
            self._absent_since_s.pop(place, None)
            return True
        if not all(one.may_be_of(joined.record) for every in records.values() for one in every):
            return False
        since_s = self._absent_since_s.setdefault(place, now_s)
        return joined.server.is_well and now_s - since_s < ABSENT_S

    def _join(self, place: Place, listed: Listed, registry: str, now_s: float) -> Server:
        server = Server(
            listed.role,
            listed.url,
            listed.bootstrap_port,
            bootstrap_host=listed.bootstrap_host,
            joined_s=now_s,
        )
        self._joined[place] = _Joined(server, listed.record, registry)
        self._servers.join(server)
        return server

    def _remove(self, place: Place) -> Server:
        server = self._joined.pop(place).server
        self._absent_since_s.pop(place, None)
        self._servers.leave(server)
        return server

    def _contradictions(self, wanted: dict[Place, dict[str, list[Listed]]]) -> Iterator[str]:
        for place, by_registry in wanted.items():
            known = self._named.get(place) or self._joined[place].server
            for registry, every in by_registry.items():
                for one in every:
                    if one.role != known.role:
                        yield (
                            f"{one.url} is a {one.role} server by the registry at {registry}, and"
                            f" a {known.role} server by what was told before, which counts"
                        )
