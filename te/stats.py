# SPDX-License-Identifier: Apache-2.0
"""What an engine counts: the figures of ``Engine.stats`` and ``Engine.links``.

Counters begin at 0 with the engine and only rise; those of links that have ended stay in the sums.
Bytes are payload: the bytes of blocks, without headers, acknowledgements or what encryption adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from te.reasons import reason_name

__all__ = [
    "LINKS_MAX",
    "EngineStatus",
    "FenceStats",
    "LinkStats",
    "Outcomes",
    "OutcomesTuple",
    "RailFlow",
    "RailStats",
    "Stats",
    "TallyTuple",
    "TransportStats",
    "flows_of",
    "outcomes_of",
    "transport_stats",
]

OutcomesTuple: TypeAlias = tuple[int, int, dict[int, int], int, int, int, int]
"""Outcomes as the compiled half gives them (``te.core.engine``)."""
TallyTuple: TypeAlias = tuple[list[tuple[int, int]], OutcomesTuple, dict[int, int]]
"""The tally of one transport as the compiled half gives it."""


LINKS_MAX: Final = 4096
"""Links in an answer of a status socket; one takes about a kilobyte."""


@dataclass(frozen=True)
class Outcomes:
    """What became of transfers."""

    #: Transfers that were submitted to this engine (``Peer.write``, ``Peer.read``) and are done.
    transfers_done: int
    #: Their blocks, as they were submitted, and the bytes of these.
    blocks_done: int
    bytes_done: int
    #: Transfers submitted to this engine that failed, by the name of the reason (``te.reasons``):
    #: ``"stalled"``, ``"was_refused"``, … Reasons that did not occur are left out.
    transfers_failed: dict[str, int]
    transfers_cancelled: int
    #: Writes of peers that have landed completely in this engine's memory, and their bytes.
    transfers_landed: int
    bytes_landed: int


@dataclass(frozen=True)
class RailFlow:
    """The bytes of one rail, or of all rails with the same number."""

    #: Handed to the network (over RDMA: acknowledged by the peer's device); on the same host:
    #: offered to the peer, which copies.
    bytes_sent: int
    #: Landed in this engine's memory. What a peer has written over RDMA is counted when the whole
    #: transfer has landed, and divided among the rails by their shares of its pieces.
    bytes_received: int


@dataclass(frozen=True)
class RailStats:
    """One rail of a link."""

    #: What it leads over: an RDMA device, or the two addresses of a TCP connection; empty if that
    #: is not known.
    name: str
    #: ``"up"`` or ``"down"``. Of rails over RDMA that this engine makes also ``"suspect"`` (has
    #: work that does not move, and gets more only when no rail is up), ``"rebuild"`` (gets a new
    #: queue pair), or ``"probe"`` (has one, and must carry a small write before anything else).
    state: str
    flow: RailFlow
    #: Bytes that the rail has yet to carry, and the rate in bytes per second that is expected of
    #: it; known for rails over RDMA that this engine makes, else 0.
    bytes_in_flight: int = 0
    bytes_per_s: float = 0.0
    #: Why the rail was last given up; empty if it never was.
    reason: str = ""


@dataclass(frozen=True)
class LinkStats:
    """The connection with one peer, as far as one side opened it."""

    #: The peer's id, and where it is: ``host:port`` where it listens, or where it dialled from.
    peer: str
    address: str
    #: The peer has opened the link, to write to this engine or read from it; else this engine has.
    is_incoming: bool
    #: The transport's name, and why no preferred transport is used (of links that this engine
    #: opened); empty for the first choice.
    transport: str
    transport_reason: str
    #: Who encrypts what goes over the network: ``"kernel"``, ``"libcrypto"``, or ``""`` for nobody.
    encrypted_by: str
    #: What the local devices or interface carry at best; 0.0 if it is not known.
    bytes_per_s_max: float
    rails: tuple[RailStats, ...]
    #: Transfers submitted to this engine that have no outcome yet.
    transfers_unfinished: int
    outcomes: Outcomes
    #: Why the last rail that was lost went down, if one was.
    last_error: str

    @property
    def nbytes(self) -> int:
        """Bytes of both directions."""
        return sum(one.flow.bytes_sent + one.flow.bytes_received for one in self.rails)


@dataclass(frozen=True)
class TransportStats:
    """What went by one transport: the sums over all its links, those that have ended included."""

    bytes_sent: int
    bytes_received: int
    #: The same bytes by the number of the rail within its link, from 0.
    rails: tuple[RailFlow, ...]
    outcomes: Outcomes
    #: Links that have ended, by reason.
    links_ended: dict[str, int]
    #: Rails over RDMA that were up and went down while their link stayed, and rails that came back
    #: up on the same link.
    rails_lost: int
    rails_remade: int


@dataclass(frozen=True)
class FenceStats:
    """Tags closed by ``Engine.fence``, or by a ``Fence`` that was waited for or polled."""

    #: Fences that were confirmed.
    confirmed: int
    #: The sum of their times from ``Engine.revoke`` to the confirmation.
    confirmed_s: float
    #: Waits that ended with ``te.FenceTimeout``.
    timed_out: int


@dataclass(frozen=True)
class Stats:
    """What an engine has done since it started, and what it has now."""

    #: Payload handed to the network, in bytes.
    bytes_sent: int
    #: Payload that landed in registered memory, in bytes.
    bytes_received: int
    #: Outcomes of transfers submitted here.
    transfers_done: int
    transfers_failed: int
    transfers_cancelled: int
    #: Peers this engine can write to.
    peers: int
    #: Connections in use, of both directions.
    rails: int
    #: Transports this engine offers and uses.
    transports: tuple[str, ...]
    #: How each live peer is reached, by its id: the transport, and why not by a preferred one.
    peer_transports: dict[str, tuple[str, str]]
    #: What the way to each peer carries at best (``Peer.bytes_per_s``).
    peer_bytes_per_s: dict[str, float]
    #: The figures of each transport that has had a link, by its name.
    by_transport: dict[str, TransportStats]
    fences: FenceStats
    #: Links opened by ``Engine.connect``, and those of them whose transport was not the first
    #: choice.
    connects: int
    connects_fallen_back: int
    #: Registered memory in bytes, by kind (``Region.kind``).
    registered_bytes: dict[str, int]


@dataclass(frozen=True)
class EngineStatus:
    """The answer of an engine's status socket to "engine" (``te.status``)."""

    id: str
    pid: int
    #: The command line of the process, shortened.
    process: str
    host: str
    port: int
    stats: Stats
    #: The links that stand; at most ``LINKS_MAX``, those with the most bytes.
    links: tuple[LinkStats, ...]
    #: ``Config.label``.
    label: str = ""


def outcomes_of(counted: OutcomesTuple) -> Outcomes:
    """The compiled half's figures, with names for the reasons."""
    done, cancelled, failed, blocks, nbytes, landed, landed_nbytes = counted
    return Outcomes(done, blocks, nbytes, _named(failed), cancelled, landed, landed_nbytes)


def flows_of(counted: list[tuple[int, int]], least: int = 0) -> tuple[RailFlow, ...]:
    """Without the last rails that have carried nothing, but at least so many."""
    used = max((i + 1 for i, flow in enumerate(counted) if any(flow)), default=0)
    return tuple(RailFlow(*flow) for flow in counted[: max(used, least)])


def transport_stats(counted: TallyTuple, rails_lost: int, rails_remade: int) -> TransportStats:
    """The figures of one transport."""
    flows, outcomes, ended = counted
    return TransportStats(
        sum(sent for sent, _ in flows),
        sum(received for _, received in flows),
        flows_of(flows),
        outcomes_of(outcomes),
        _named(ended),
        rails_lost,
        rails_remade,
    )


def _named(by_code: Mapping[int, int]) -> dict[str, int]:
    return {reason_name(code): count for code, count in by_code.items()}
