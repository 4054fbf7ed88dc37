# SPDX-License-Identifier: Apache-2.0
"""What a rank reports to its registry with each renewal of its lease, for the status page: rates
since the report before, rails, decode ranks that a prefill rank is connected to, rooms and
failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from bootstrap_server import (
    FailureStatus,
    PeerStatus,
    RailStatus,
    RankStatus,
    TransportRate,
)
from bootstrap_server.ranks.rank_status import (
    NAME_CHARS_MAX,
    PEERS_MAX,
    RAILS_MAX,
    TRANSPORTS_MAX,
    Axes,
)
from sglang_mooncake.layout import Place
from te.stats import LinkStats, Stats

__all__ = ["DecodePeer", "RankReport"]

#: Of an engine's id, enough to tell the decode ranks of a deployment apart.
_ID_CHARS = 12


class DecodePeer(NamedTuple):
    """A decode rank that this rank can write to: the id of its engine, its host, its place."""

    engine_id: str
    host: str
    place: Place


@dataclass(slots=True)
class _Rail:
    is_up: bool = True
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Sample:
    """What had been moved at a time, in bytes: received and sent by transport, both together by
    rail and by peer."""

    at_s: float
    by_transport: dict[str, tuple[int, int]]
    by_rail: dict[str, _Rail]
    by_peer: dict[str, tuple[str, int]]


class RankReport:
    """Makes a report when called: from one thread, that of the lease.

    Args:
        stats, links: of the rank's engine (`te.Engine.stats`, `te.Engine.links`).
        peers: the decode ranks that it can write to.
        rooms: how many rooms ended how, and are open.
        failures: the last ones.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        stats: Callable[[], Stats],
        links: Callable[[], Iterable[LinkStats]],
        peers: Callable[[], Iterable[DecodePeer]],
        rooms: Callable[[], Mapping[str, int]],
        failures: Callable[[], tuple[FailureStatus, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats, self._links, self._peers = stats, links, peers
        self._rooms, self._failures, self._clock = rooms, failures, clock
        self._before = self._sample()

    def __call__(self) -> RankStatus:
        """The report. Rates are averages since the report before."""
        before, now = self._before, self._sample()
        self._before = now
        passed_s = max(now.at_s - before.at_s, 1e-3)

        def rate(new_nbytes: int, old_nbytes: int) -> float:
            # A link that has ended takes its bytes along.
            return max(new_nbytes - old_nbytes, 0) / passed_s

        peers = list(self._peers())
        return RankStatus(
            rates=tuple(
                TransportRate(name, *map(rate, moved, before.by_transport.get(name, (0, 0))))
                for name, moved in sorted(now.by_transport.items())[:TRANSPORTS_MAX]
            ),
            rails=tuple(
                RailStatus(
                    name, rail.is_up, rate(rail.nbytes, before.by_rail.get(name, _Rail()).nbytes)
                )
                for name, rail in sorted(now.by_rail.items())[:RAILS_MAX]
            ),
            peers=tuple(_peer(one, now.by_peer, before.by_peer, rate) for one in peers[:PEERS_MAX]),
            peers_total=len(peers),
            rooms=dict(self._rooms()),
            failures=self._failures(),
        )

    def _sample(self) -> _Sample:
        by_rail: dict[str, _Rail] = {}
        by_peer: dict[str, tuple[str, int]] = {}
        for link in self._links():
            for one in link.rails:
                rail = by_rail.setdefault(_rail_name(one.name, link.transport), _Rail())
                rail.is_up = rail.is_up and one.state == "up"
                rail.nbytes += one.flow.bytes_sent + one.flow.bytes_received
            _, others = by_peer.get(link.peer, ("", 0))
            by_peer[link.peer] = (link.transport, others + link.nbytes)
        by_transport = {
            name: (moved.bytes_received, moved.bytes_sent)
            for name, moved in self._stats().by_transport.items()
        }
        return _Sample(self._clock(), by_transport, by_rail, by_peer)


def _peer(
    peer: DecodePeer,
    now: dict[str, tuple[str, int]],
    before: dict[str, tuple[str, int]],
    rate: Callable[[int, int], float],
) -> PeerStatus:
    transport, nbytes = now.get(peer.engine_id, ("", 0))
    _, old_nbytes = before.get(peer.engine_id, ("", 0))
    return PeerStatus(
        peer.engine_id[:_ID_CHARS],
        peer.host[:NAME_CHARS_MAX],
        _axes(peer.place.coords),
        _axes(peer.place.topology),
        transport,
        rate(nbytes, old_nbytes),
    )


def _rail_name(name: str, transport: str) -> str:
    """The local end of a rail: a device, an address without its port, or just the transport where
    rails have no names."""
    local, _, _ = name.partition(" ")
    address, _, port = local.rpartition(":")
    return (address if address and port.isdecimal() else local)[:NAME_CHARS_MAX] or transport


def _axes(struct: Any) -> Axes:
    return cast(Axes, msgspec.structs.astuple(struct))
