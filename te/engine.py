# SPDX-License-Identifier: Apache-2.0
"""The engine: memory, peers and arrivals of one process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt

from te.config import Config
from te.connect.accept import Acceptor
from te.connect.chosen import Chosen
from te.connect.outgoing import open_link
from te.connect.pool import Pool
from te.core.engine import Engine as Plane
from te.errors import ClosedError, FenceTimeout
from te.fences import QUIESCE_TIMEOUT_S, Fence, late
from te.handshake import PROTOCOL_VERSION, Card, CardRegion, decode_card, encode
from te.memory import Region, RegionTable, Remote
from te.memory_kinds.ring import Ring
from te.peers import Peer
from te.proof import keys_of
from te.tags import TAG_LIMIT, Identified, check_tag, packed_peer, packed_ranges
from te.transfers import Notifier
from te.transports import registry
from te.transports.base import Local, Transport

__all__ = ["Engine", "Stats"]

logger = logging.getLogger(__name__)

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
    #: Transports this engine offers and uses.
    transports: tuple[str, ...]
    #: How each live peer is reached, by its id: the transport, and why not by a preferred one.
    peer_transports: dict[str, tuple[str, str]]
    #: And what the way there carries at best (``Peer.bytes_per_s``).
    peer_bytes_per_s: dict[str, float]


def _work(plane: Plane, index: int, memory: RegionTable) -> None:
    """A worker's thread. ``memory``: the buffers are kept for as long as it may write to them."""
    plane.work(index)
    del memory


class Engine:
    """Registers memory, writes to peers, and lets peers write here. Any thread may call anything.

    Use it as a context manager, or call ``close``.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Listens and starts the threads; ``te.ListenError`` when the address cannot be had,
        ``te.DeviceError`` when no transport that is wanted can be used, ``te.TopologyError`` when
        ``Config.nics`` or ``Config.topology`` name devices that are not there, ``OSError`` and
        ``RuntimeError`` without descriptors or threads. Then nothing of it is left."""
        self._config = Config() if config is None else config
        self._id = secrets.token_hex(16)
        self._epoch = time.time_ns()
        config = self._config
        self._plane = Plane(
            min(config.workers, os.cpu_count() or 1),
            config.stall_timeout_s,
            config.rail_timeout_s,
            config.spin_s,
            config.segment_bytes,
            config.segment_blocks,
        )
        self._chosen = Chosen([self._transport(name) for name in config.transports], config.encrypt)
        self._ring = Ring(self._plane, config.staging_bytes, config.staging_slot_bytes)
        self._memory = RegionTable(
            self._plane,
            self._chosen.fabric,
            self._chosen.refusal,
            self._ring if self._chosen.stages else None,
        )
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._closed = False
        short_id = self._id[:8]
        self._pool = Pool(f"te-pool-{short_id}")
        self._local = Local(
            self._id,
            self._epoch,
            config,
            self._plane,
            self._memory,
            keys_of(config.keys),
            self._pool.run,
        )
        self._notifier = Notifier(f"te-notify-{short_id}", self._plane)
        self._workers: list[threading.Thread] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._pool.stop)
            undo.callback(self._chosen.close, CLOSE_TIMEOUT_S)
            self._acceptor = Acceptor(f"te-accept-{short_id}", self._local, self._chosen)
            undo.callback(self._acceptor.loop.stop, CLOSE_TIMEOUT_S)
            undo.callback(self._end_workers)
            for i in range(min(config.workers, os.cpu_count() or 1)):
                name = f"te-worker-{short_id}-{i}"
                arguments = [self._plane, i, self._memory]
                worker = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
            undo.pop_all()

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
        host, port = self._acceptor.address
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
        """Fails unfinished transfers, closes connections and devices, ends the threads. Idempotent.

        After it returns nothing lands in this engine's memory any more. Raises ``te.FenceTimeout``
        if a worker did not end within seconds, because it is in the middle of a landing: then the
        memory must not be reused or unmapped; registered buffers are kept until it ends. Calling it
        again waits again.
        """
        self._closed = True
        self._pool.stop()
        self._chosen.close(CLOSE_TIMEOUT_S)
        self._acceptor.loop.stop(CLOSE_TIMEOUT_S)
        alive = self._end_workers()
        self._notifier.stop(CLOSE_TIMEOUT_S)
        if alive:
            raise FenceTimeout(
                f"{self!r}: {', '.join(alive)} did not end within {CLOSE_TIMEOUT_S} s and may"
                " still write; the engine's memory must not be reused; call close again"
            )
        if not self._ring.close(CLOSE_TIMEOUT_S):
            raise FenceTimeout(
                f"{self!r}: a device is still copying; the engine's memory must not be reused;"
                " call close again"
            )
        self._memory.close()
        if self._chosen.fabric is not None:
            self._chosen.fabric.close()

    def _end_workers(self) -> list[str]:
        """Ends the threads that move bytes; the names of those that did not end in time."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        self._plane.stop()
        for worker in self._workers:
            worker.join(max(deadline_s - time.monotonic(), 0.0))
        return [worker.name for worker in self._workers if worker.is_alive()]

    # -- memory

    def register(
        self,
        buffer_or_address: Any,
        nbytes: int | None = None,
        location: str | None = None,
        remote: Remote = "tagged",
    ) -> Region:
        """Lets this engine use a range of memory, and peers as far as ``remote`` says.

        ``"tagged"``: peers may write under a tag that is open (``expect``). ``"read"``: they may
        read, and not write. ``"read-write"``: they may read and write, with a tag or without.
        ``"none"``: they may do nothing; the memory is for this engine's own transfers, as the
        source of writes or the destination of reads. What is not allowed fails at the peer, before
        a byte moves, with a sentence that names the right. docs/architecture.md says what of this
        holds over RDMA against a peer that does not keep to the protocol.

        Takes an object with a writable, contiguous buffer (of which ``nbytes`` limits the part)
        or an address with ``nbytes``. The region keeps the buffer alive; memory behind a bare
        address must stay mapped until ``deregister``. ``location`` says what RDMA devices it is
        near to: ``"cpu:0"``, a NUMA node, ``"cuda:3"``, a GPU counted by PCI address, or ``"*"``
        for none in particular; without it that is the node of the first page, or the GPU that the
        driver tells. Raises
        ``te.RegistrationError`` for nothing, a null address, an overlap with another region,
        another word for the location or for ``remote``, or memory that is not mapped readable and
        writable; then nothing was registered.

        The address may be of CUDA memory. RDMA devices take it as a dma-buf, or through the
        peer-memory module nvidia-peermem; over other transports it is staged (``staging_bytes``).
        An engine with several transports, some of which cannot move the memory, goes without those
        from then on, and says so in the log; once it has made a card, or connected, that memory is
        refused instead.
        """
        self._check_open()
        region = self._memory.register(buffer_or_address, nbytes, location, remote)
        self._chosen.share(region, self._config.connect_timeout_s)
        return region

    def deregister(self, region: Region, timeout_s: float = QUIESCE_TIMEOUT_S) -> None:
        """Takes the right back: after it returns nothing can land in the region, or be read.

        Waits for up to ``timeout_s`` for transfers that read from it, as those that were cancelled
        do until their destination has answered, and for landings under way. Raises
        ``te.RegistrationError`` if it is not registered, or transfers still read from it (then
        nothing was changed), ``te.FenceTimeout`` if a landing did not end: then nothing new lands,
        but the memory must not be freed yet; call it again.
        """
        try:
            self._memory.deregister(region, timeout_s)
        finally:  # Also where it is gone, but a landing under way did not end.
            if region not in self._memory.regions:
                self._chosen.unshare(region, self._config.connect_timeout_s)

    # -- peers

    def card(self) -> bytes:
        """What a peer needs to connect: identity, address, transports, present regions in which
        peers may do anything."""
        self._check_open()
        host, port = self._acceptor.address
        return encode(
            Card(
                protocol=PROTOCOL_VERSION,
                id=self._id,
                epoch=self._epoch,
                host=host,
                port=port,
                offers=self._chosen.offers(),
                regions=[
                    CardRegion(region.address, region.nbytes, region.kind)
                    for region in self._memory.regions
                    if region.remote != "none"
                ],
            )
        )

    def connect(self, card: bytes, timeout_s: float | None = None) -> Peer:
        """A peer for the engine that made the card; the existing one if that is alive.

        Blocks for at most ``timeout_s`` (default ``Config.connect_timeout_s``). Raises
        ``te.ConnectError`` (unreachable, restarted, no common key or transport),
        ``te.VersionError``, ``te.HandshakeError`` (not a card, or not an engine that answers).
        """
        self._check_open()
        decoded = decode_card(card)
        key = (decoded.id, decoded.epoch)
        peer = self._live_peer(key)
        if peer is not None:
            return peer
        wait_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        opened = open_link(self._chosen, decoded, wait_s)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None or not peer.alive:
                peer = Peer(decoded, opened, self._memory, self._config, self._notifier)
                self._peers[key] = peer
                return peer
        # Another thread connected to this peer at the same time.
        opened.link.close()
        return peer

    # -- the destination's side

    def expect(
        self,
        tag: int,
        peer: str | Identified | None = None,
        ranges: npt.ArrayLike | None = None,
    ) -> None:
        """Opens a tag, 1 to 2**64 - 1, for writes; ``ValueError`` if it is open already, a fence
        of it has not been confirmed, or an argument is not what follows.

        ``peer``: only that engine may write under it: an id, for all lives of the engine, or what
        has an id and an epoch (``te.Peer``, ``te.Identity``), for that life alone. ``ranges``,
        shape (n, 2) of (address, bytes): only there, as far as the regions allow it too; at most
        65,536 that are apart from each other. A write by another engine is refused as if the tag
        were not open. One outside the ranges is refused before a byte of its segment lands, but
        over RDMA lands in any region that allows tagged writes: a NIC knows no ranges.

        Choose a value never used before (``te.new_tag`` makes one that nobody can guess): writes
        that a frozen source submitted under an earlier use of it and has not begun to send would
        count as new ones.
        """
        self._check_open()
        check_tag(tag)
        is_new, is_open = self._plane.open_tag(
            tag,
            b"" if peer is None else packed_peer(peer),
            None if ranges is None else packed_ranges(ranges),
        )
        if not is_open:
            raise ValueError(
                f"tag {tag:#x} is being fenced; call fence until it returns, or choose a new tag"
            )
        if not is_new:
            raise ValueError(f"tag {tag:#x} is open already")

    def arrived(self, tag: int) -> int:
        """Transfers with this tag that have landed completely; 0 if the tag is not open, and no
        fence of it is waiting for confirmation."""
        return self._plane.arrived(tag) if 0 < tag < TAG_LIMIT else 0

    def arrived_nbytes(self, tag: int) -> int:
        """Payload in bytes of the transfers that ``arrived(tag)`` counts; 0 if it is not open.

        Read the count first: then the bytes of every transfer that it counts are in this.
        """
        return self._plane.arrived_nbytes(tag) if 0 < tag < TAG_LIMIT else 0

    def revoke(self, tag: int) -> Fence | None:
        """Closes a tag without waiting: no landing begins under it any more, and ``Fence`` says
        when those under way have ended. None if the tag is not open, and not being closed."""
        check_tag(tag)
        revocation = self._plane.revoke_tag(tag)
        return None if revocation is None else Fence(tag, revocation, self._acceptor.withdraw)

    def fence(self, tag: int, timeout_s: float = QUIESCE_TIMEOUT_S) -> int:
        """Closes a tag: after it returns no write of it can land, whatever its source does.

        Returns the last ``arrived(tag)`` and forgets it; 0 if the tag was not open. Raises
        ``te.FenceTimeout`` if a landing under it did not end in time: then the memory must
        not be reused, the tag stays closed, and ``fence`` is to be called again. Several threads
        may fence a tag at once; each returns when it is confirmed.
        """
        fence = self.revoke(tag)
        return 0 if fence is None else fence.wait(timeout_s)

    def fence_peer(self, engine_id: str) -> int:
        """Drops the links of that engine into this one; returns how many there were.

        After it returns nothing can land that it submitted before. It may connect again. Raises
        ``te.FenceTimeout`` like ``fence``.
        """
        count = self._acceptor.fence(engine_id, QUIESCE_TIMEOUT_S)
        if count is None:
            raise FenceTimeout(late(QUIESCE_TIMEOUT_S))
        return count

    def stats(self) -> Stats:
        """Counters since the start."""
        sent, received, rails_out, rails_in, done, failed, cancelled = self._plane.counters()
        alive = self._live_peers()
        return Stats(
            bytes_sent=sent,
            bytes_received=received,
            transfers_done=done,
            transfers_failed=failed,
            transfers_cancelled=cancelled,
            peers=len(alive),
            rails=rails_out + rails_in,
            transports=self._chosen.names,
            peer_transports={one.id: (one.transport, one.transport_reason) for one in alive},
            peer_bytes_per_s={one.id: one.bytes_per_s for one in alive},
        )

    def _transport(self, name: str) -> Transport:
        """``te.TopologyError``. Of its own, so that ``te bench --null-post`` can have devices that
        move nothing."""
        transport: Transport = registry.load(name)(self._config)
        return transport

    def _live_peers(self) -> list[Peer]:
        with self._lock:
            return [peer for peer in self._peers.values() if peer.alive]

    def _live_peer(self, key: tuple[str, int]) -> Peer | None:
        """The peer for the key; forgets the dead, so that restarts do not pile up."""
        with self._lock:
            self._peers = {key: peer for key, peer in self._peers.items() if peer.alive}
            return self._peers.get(key)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the engine {self._id} was closed")
