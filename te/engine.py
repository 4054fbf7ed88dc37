# SPDX-License-Identifier: Apache-2.0
"""The engine: memory, peers and arrivals of one process."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from te.arrivals import Arrivals
from te.config import Config
from te.errors import ClosedError, ConnectError
from te.handshake import PROTOCOL_VERSION, Card, CardRegion, decode_card, encode
from te.memory import Region, RegionTable
from te.peers import Peer
from te.transfers import Status
from te.transports.base import Local, Transport
from te.transports.tcp import TcpTransport

__all__ = ["Engine", "Stats"]

# A landing is one non-blocking call of at most a few MiB: milliseconds, even on a busy machine.
QUIESCE_TIMEOUT_S: Final = 0.9
CLOSE_TIMEOUT_S: Final = 5.0


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
    transports: tuple[str, ...]


class Engine:
    """Registers memory, writes to peers, and lets peers write here. Any thread may call anything.

    Use it as a context manager, or call ``close``.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Listens and starts the threads; ``te.ListenError`` when the address cannot be had."""
        self._config = Config() if config is None else config
        self._id = secrets.token_hex(16)
        self._epoch = time.time_ns()
        self._memory = RegionTable()
        self._arrivals = Arrivals()
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._outcomes: Counter[Status] = Counter()
        self._closed = False
        self._transport: Transport = TcpTransport(
            Local(self._id, self._epoch, self._config, self._memory, self._arrivals)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        host, port = self._transport.address
        return f"Engine({self._id} at {host} port {port}{', closed' if self._closed else ''})"

    @property
    def id(self) -> str:
        """Random, 32 hex digits."""
        return self._id

    @property
    def epoch(self) -> int:
        """When it started, in ns since 1970."""
        return self._epoch

    def close(self) -> None:
        """Fails unfinished transfers, closes connections, ends the threads. Idempotent.

        After it returns nothing lands in this engine's memory any more.
        """
        self._closed = True
        self._transport.close(CLOSE_TIMEOUT_S)

    # -- memory

    def register(self, buffer_or_address: Any, nbytes: int | None = None) -> Region:
        """Lets this engine read, and its peers write, a range of memory.

        Takes an object with a writable, contiguous buffer (of which ``nbytes`` limits the part)
        or an address with ``nbytes``. The region keeps the buffer alive; memory behind a bare
        address must stay mapped until ``deregister``. Raises ``te.RegistrationError`` for nothing,
        a null address, an overlap with another region, or memory that is not mapped readable and
        writable; then nothing was registered.
        """
        self._check_open()
        return self._memory.register(buffer_or_address, nbytes)

    def deregister(self, region: Region) -> None:
        """Takes the right back: after it returns nothing can land in the region.

        Raises ``te.RegistrationError`` if it is not registered or unfinished transfers read from
        it, ``te.FenceTimeout`` if a landing under way did not end (do not free the memory then).
        """
        self._memory.deregister(region)
        self._transport.quiesce(QUIESCE_TIMEOUT_S)

    # -- peers

    def card(self) -> bytes:
        """What a peer needs to connect: identity, address, transports, present regions."""
        self._check_open()
        host, port = self._transport.address
        return encode(
            Card(
                protocol=PROTOCOL_VERSION,
                id=self._id,
                epoch=self._epoch,
                host=host,
                port=port,
                transports=list(self._config.transports),
                regions=[
                    CardRegion(region.address, region.nbytes, region.kind)
                    for region in self._memory.map.regions
                ],
            )
        )

    def connect(self, card: bytes, timeout_s: float | None = None) -> Peer:
        """A peer for the engine that made the card; the existing one if that is alive.

        Blocks for at most ``timeout_s`` (default ``Config.connect_timeout_s``). Raises
        ``te.ConnectError`` (unreachable, restarted, no common transport), ``te.VersionError``,
        ``te.HandshakeError`` (not a card, or not an engine that answers).
        """
        self._check_open()
        decoded = decode_card(card)
        if self._transport.name not in decoded.transports:
            raise ConnectError(
                f"no common transport: the engine {decoded.id} offers"
                f" {', '.join(decoded.transports)}, this one {self._transport.name}"
            )
        key = (decoded.id, decoded.epoch)
        peer = self._live_peer(key)
        if peer is not None:
            return peer
        wait_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        rail = self._transport.connect(decoded, wait_s)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None or not peer.alive:
                peer = self._peers[key] = Peer(decoded, rail, self._memory, self._count)
                return peer
        rail.close("another thread connected to this peer at the same time")
        return peer

    # -- the destination's side

    def expect(self, tag: int) -> None:
        """Opens a tag, 1 to 2**64 - 1, for writes; ``ValueError`` if it is open already.

        Choose a value never used before: writes that a frozen source submitted under an earlier
        use of it and has not begun to send would count as new ones.
        """
        self._check_open()
        self._arrivals.expect(tag)

    def arrived(self, tag: int) -> int:
        """Transfers with this tag that have landed completely; 0 if the tag is not open."""
        return self._arrivals.count(tag)

    def fence(self, tag: int) -> int:
        """Closes a tag: after it returns no write of it can land, whatever its source does.

        Returns the last ``arrived(tag)`` and forgets it; 0 if the tag was not open. Raises
        ``te.FenceTimeout`` if a landing under way did not end within a second.
        """
        count = self._arrivals.close(tag)
        self._transport.quiesce(QUIESCE_TIMEOUT_S)
        return count

    def fence_peer(self, engine_id: str) -> int:
        """Drops the connections of that engine into this one; returns how many there were.

        After it returns nothing can land that it submitted before. It may connect again. Raises
        ``te.FenceTimeout`` like ``fence``.
        """
        return self._transport.drop_incoming(engine_id, QUIESCE_TIMEOUT_S)

    def stats(self) -> Stats:
        """Counters since the start."""
        counters = self._transport.counters()
        with self._lock:
            return Stats(
                bytes_sent=counters.bytes_sent,
                bytes_received=counters.bytes_received,
                transfers_done=self._outcomes[Status.DONE],
                transfers_failed=self._outcomes[Status.FAILED],
                transfers_cancelled=self._outcomes[Status.CANCELLED],
                peers=sum(peer.alive for peer in self._peers.values()),
                rails=counters.rails,
                transports=self._config.transports,
            )

    def _live_peer(self, key: tuple[str, int]) -> Peer | None:
        """The peer for the key; forgets the dead, so that restarts do not pile up."""
        with self._lock:
            self._peers = {key: peer for key, peer in self._peers.items() if peer.alive}
            return self._peers.get(key)

    def _count(self, status: Status) -> None:
        with self._lock:
            self._outcomes[status] += 1

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the engine {self._id} was closed")
