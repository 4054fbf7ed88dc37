# SPDX-License-Identifier: Apache-2.0
"""Which servers the router has, where registries tell of them. Pure: the caller tells the time.

Servers that the command line names stay. One that a registry lists joins. One that no registry
lists any more leaves once it is ill as well: a registry that was started again, or whose ranks lost
their leases for a moment, does not end a server that answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from sglang_mooncake.router.servers import Role, Server, Servers

__all__ = ["ABSENT_S", "Change", "Listed", "Membership"]

#: A server that answers and is listed nowhere leaves after so long: four leases of its ranks.
ABSENT_S: Final = 60.0


class Listed(NamedTuple):
    """A server as a registry lists it. The last two are of a prefill server's own registry."""

    role: Role
    url: str
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None


class Change(NamedTuple):
    """Servers that have come and gone, and sentences about those that cannot be taken."""

    joined: tuple[Server, ...]
    left: tuple[Server, ...]
    refused: tuple[str, ...]


class Membership:
    """Changes ``servers``."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._named: Final = {one.url: one for one in servers.all()}
        #: By registry, what it has listed last; the first one that lists a server counts.
        self._listed: dict[str, tuple[Listed, ...]] = {}
        self._joined: dict[str, tuple[Listed, Server]] = {}
        self._absent_since_s: dict[str, float] = {}
        self._refused: set[str] = set()

    def told(self, registry: str, listed: Sequence[Listed]) -> None:
        """What a registry lists now, in place of what it has listed before."""
        self._listed[registry] = tuple(listed)

    def settle(self, now_s: float) -> Change:
        """Lets servers join and leave by all that was told."""
        wanted, refused = self._wanted()
        left = [self._remove(url) for url in self._gone(wanted, now_s)]
        joined = []
        for url, listed in wanted.items():
            if url not in self._joined:
                server = Server(
                    listed.role,
                    url,
                    listed.bootstrap_port,
                    bootstrap_host=listed.bootstrap_host,
                    joined_s=now_s,
                )
                self._joined[url] = listed, server
                self._servers.join(server)
                joined.append(server)
        news = tuple(one for one in refused if one not in self._refused)
        self._refused = set(refused)
        return Change(tuple(joined), tuple(left), news)

    def _wanted(self) -> tuple[dict[str, Listed], list[str]]:
        wanted: dict[str, Listed] = {}
        refused = []
        for registry, every in self._listed.items():
            for one in every:
                named = self._named.get(one.url)
                role = wanted.setdefault(one.url, one).role if named is None else named.role
                if role != one.role:
                    refused.append(
                        f"{one.url} is a {one.role} server by the registry at {registry}, and a "
                        f"{role} server by what was told before, which counts"
                    )
        return wanted, refused

    def _gone(self, wanted: dict[str, Listed], now_s: float) -> list[str]:
        gone = []
        for url, (listed, server) in self._joined.items():
            if url in wanted:
                self._absent_since_s.pop(url, None)
                if wanted[url] != listed:  # Started again, with another registry.
                    gone.append(url)
                continue
            since_s = self._absent_since_s.setdefault(url, now_s)
            if not server.is_well or now_s - since_s >= ABSENT_S:
                gone.append(url)
        return gone

    def _remove(self, url: str) -> Server:
        _, server = self._joined.pop(url)
        self._absent_since_s.pop(url, None)
        self._servers.leave(server)
        return server
