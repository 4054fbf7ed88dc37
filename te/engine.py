# SPDX-License-Identifier: Apache-2.0
"""The engine: memory, peers and arrivals of one process."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy.typing as npt

from te.config import Config
from te.connect.accept import Acceptor
from te.connect.pool import Pool
from te.connect.transports import EngineTransports
from te.core.engine import Engine as Plane
from te.digests import Digester
from te.errors import ClosedError, FenceTimeout, ListenError, StatusSocketError
from te.fences import QUIESCE_TIMEOUT_S, Fence, FenceCounter
from te.forking import Origin
from te.handshake import PROTOCOL_VERSION, Card, CardRegion, decode_card, encode
from te.memory import Region, RegionTable, Remote
from te.memory_kinds.ring import Ring
from te.peers import Note, Peer
from te.proof import keys_of
from te.stats import LINKS_MAX, EngineStatus, LinkStats, Stats, transport_stats
from te.status import Answer, StatusSocket, process_name
from te.tags import (
    TAG_LIMIT,
    Identified,
    check_tag,
    packed_peer,
    packed_ranges,
    unpacked_peer,
)
from te.transfers import Notifier
from te.transports import registry
from te.transports.base import Local, Transport

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 5.0


def _work(plane: Plane, index: int, memory: RegionTable) -> None:
    """A worker's thread. ``memory``: the buffers are kept for as long as it may write to them."""
    plane.work(index)
    del memory


class Engine:
    """The transfer engine of one process. All methods are thread-safe.

    Use it as a context manager, or call ``close``.
    """

    def __init__(self, config: Config | None = None) -> None:
        """Starts to listen, unless ``Config.listens`` is False, and starts the engine's threads.

        Raises:
            te.ListenError: the engine cannot listen on the configured address.
            te.DeviceError: none of the configured transports can be used.
            te.TopologyError: ``Config.nics`` or ``Config.topology`` name devices that do not exist.
            OSError, RuntimeError: the process has no free file descriptors or threads.

        When the constructor raises, it has released everything that it had acquired.
        """
        self._config = Config() if config is None else config
        self._id = secrets.token_hex(16)
        self._epoch = time.time_ns()
        self._origin = Origin()
        config = self._config
        self._plane = Plane(
            min(config.workers, os.cpu_count() or 1),
            config.stall_timeout_s,
            config.rail_timeout_s,
            config.spin_s,
            config.segment_bytes,
            config.segment_blocks,
        )
        self._transports = EngineTransports(
            [self._transport(name) for name in config.transports], config.encrypt
        )
        self._ring = Ring(self._plane, config.staging_bytes, config.staging_slot_bytes)
        self._memory = RegionTable(
            self._plane,
            self._transports.fabric,
            self._transports.refusal,
            self._ring if self._transports.stages else None,
        )
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, int], Peer] = {}
        self._connects = self._connects_fallen_back = 0
        self._notes_dropped = 0
        self._fences = FenceCounter()
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
            undo.callback(self._transports.close, CLOSE_TIMEOUT_S)
            self._acceptor = Acceptor(f"te-accept-{short_id}", self._local, self._transports)
            undo.callback(self._acceptor.loop.stop, CLOSE_TIMEOUT_S)
            undo.callback(self._end_workers)
            for i in range(min(config.workers, os.cpu_count() or 1)):
                name = f"te-worker-{short_id}-{i}"
                arguments = [self._plane, i, self._memory]
                worker = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
            self._answers: dict[str, Answer] = {"engine": lambda _: self._status()}
            self._status_socket = self._open_status()
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
        """A random name of this engine, 32 hex digits."""
        return self._id

    @property
    def epoch(self) -> int:
        """When this engine started, in ns since 1970."""
        return self._epoch

    def close(self) -> None:
        """Fails unfinished transfers, closes connections and devices, ends the threads. Idempotent.

        After it returns nothing lands in this engine's memory any more. Raises ``te.FenceTimeout``
        if a worker did not end within seconds, because it is in the middle of a landing: then the
        memory must not be reused or unmapped; registered buffers are kept until it ends. Calling it
        again waits again.

        In a child of fork(2) it does nothing: sockets and threads are the parent's.
        """
        if not self._origin.is_here:
            return
        self._closed = True
        if self._status_socket is not None:
            self._status_socket.close()
        self._pool.stop()
        self._transports.close(CLOSE_TIMEOUT_S)
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
        self._answers.clear()  # Their functions keep this engine alive.
        if self._transports.fabric is not None:
            self._transports.fabric.close()

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
        """Registers a range of memory for transfers, and grants peers the rights in ``remote``.

        Args:
            buffer_or_address: an object with a writable, contiguous buffer, or an address. The
                region keeps a buffer alive; memory behind a bare address must stay mapped until
                ``deregister``. The address may be of CUDA memory.
            nbytes: size in bytes; required for an address. For a buffer it may be less than the
                buffer's size.
            location: the memory location, from which the engine chooses the nearest RDMA devices:
                ``"cpu:0"`` (a NUMA node), ``"cuda:3"`` (a GPU, counted by PCI address) or ``"*"``
                (no preference). Default: the NUMA node of the first page, or the GPU that CUDA's
                driver reports.
            remote: the rights of peers. ``"tagged"``: peers may write under an open tag (see
                ``expect``). ``"read"``: peers may read. ``"read-tagged"``: both, as for a cache of
                objects that are written once. ``"read-write"``: peers may read and write, with or
                without a tag. ``"none"``: peers have no access; the memory serves as the source of
                this engine's writes or the destination of its reads. A transfer without the right
                fails at the peer before a byte moves, and its reason names the right.
                docs/architecture.md says which of these rights hold over RDMA against a peer that
                violates the protocol.

        Raises:
            te.RegistrationError: the range is empty, begins at address 0, overlaps another region,
                or is not mapped readable and writable; or ``location`` or ``remote`` is none of the
                values above. Nothing was registered then.

        RDMA devices access CUDA memory as a dma-buf or through the kernel module nvidia-peermem.
        The other transports stage it through host memory (``Config.staging_bytes``). If some of the
        engine's transports cannot move the memory, the engine stops using those transports and logs
        it. Once the engine has made a card or has connected, it refuses such memory instead.
        """
        self._check_open()
        region = self._memory.register(buffer_or_address, nbytes, location, remote)
        self._transports.share(region, self._config.connect_timeout_s)
        return region

    def deregister(self, region: Region, timeout_s: float = QUIESCE_TIMEOUT_S) -> None:
        """Ends a registration. After it returns, no peer can write to the region or read from it.

        The call waits up to ``timeout_s`` seconds for transfers that still read from the region
        (a cancelled transfer does until its destination has answered) and for writes under way.

        Raises:
            te.RegistrationError: the region is not registered, or transfers still read from it.
                Nothing was changed then.
            te.FenceTimeout: a write under way did not end. No new write can begin, but the memory
                must not be freed yet; call ``deregister`` again.
        """
        try:
            self._memory.deregister(region, timeout_s)
        finally:  # The region may be gone although a landing under way did not end.
            if region not in self._memory.regions:
                self._transports.unshare(region, self._config.connect_timeout_s)

    def digester(self) -> Digester:
        """What makes digests of registered memory, such as is compared with a copy of it. It has
        memory of its own, pinned for each kind of memory that is registered now: close it before
        the engine.

        Raises:
            te.DigestError: registered memory is of a kind that this process cannot read.
        """
        self._check_open()
        return Digester(self._plane, self._memory)

    # -- peers

    def card(self) -> bytes:
        """The bytes that a peer needs to connect to this engine: its identity, address and
        transports, and the regions that peers may access now. ``te.ListenError`` if it does not
        listen (``Config.listens``)."""
        self._check_open()
        if not self._config.listens:
            raise ListenError("this engine does not listen (Config.listens), so it has no card")
        host, port = self._acceptor.address
        return encode(
            Card(
                protocol=PROTOCOL_VERSION,
                id=self._id,
                epoch=self._epoch,
                host=host,
                port=port,
                offers=self._transports.offers(),
                regions=[
                    CardRegion(region.address, region.nbytes, region.kind)
                    for region in self._memory.regions
                    if region.remote != "none"
                ],
            )
        )

    def connect(self, card: bytes, timeout_s: float | None = None) -> Peer:
        """Connects to the engine that made ``card``. A live connection to it is used again.

        Blocks for at most ``timeout_s`` seconds (default: ``Config.connect_timeout_s``).

        Raises:
            te.ConnectError: the engine is unreachable, was restarted, or has no key or no transport
                in common with this one.
            te.VersionError: the engine speaks another version of te's protocol.
            te.HandshakeError: ``card`` is not a card, or the answer is not an engine's.
        """
        self._check_open()
        decoded = decode_card(card)
        key = (decoded.id, decoded.epoch)
        self._acceptor.look()
        peer = self._live_peer(key)
        if peer is not None:
            return peer
        wait_s = self._config.connect_timeout_s if timeout_s is None else timeout_s
        opened = self._transports.open_link(decoded, wait_s)
        with self._lock:
            peer = self._peers.get(key)
            if peer is None or not peer.alive:
                peer = Peer(decoded, opened, self._memory, self._config, self._notifier)
                self._peers[key] = peer
                self._acceptor.outgoing[opened.link.handle.number] = peer
                self._connects += 1
                self._connects_fallen_back += bool(opened.reason)
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
        """Opens a tag: from now on peers may write under it.

        Args:
            tag: 1 to 2**64 - 1. Use each value once (``te.new_tag`` makes a random one). A source
                that was frozen may still have unsent writes under an earlier use of the value, and
                these would count as new ones.
            peer: the only engine that may write under the tag: an engine's id, which includes later
                restarts of it, or a ``te.Peer`` or ``te.Identity``, which names one start of it.
                Writes of other engines are refused as if the tag were not open.
            ranges: shape (n, 2) of (address, bytes): the only ranges that may be written under the
                tag, at most 65,536 that are not adjacent. The regions must allow the writes, too.
                The destination refuses a write outside the ranges before a byte of its segment
                lands. Over RDMA, where a NIC does not know ranges, it lands in any region that
                allows tagged writes.

        Raises:
            ValueError: the tag is open already, or a fence of it is not confirmed yet, or an
                argument is not as described above.
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
        """The number of transfers with this tag that have landed completely; 0 if the tag is
        neither open nor being fenced."""
        return self._plane.arrived(tag) if 0 < tag < TAG_LIMIT else 0

    def arrived_nbytes(self, tag: int) -> int:
        """The payload of the transfers that ``arrived(tag)`` counts, in bytes; 0 if it is not open.

        Call ``arrived`` first: the bytes of every transfer in that count are then in this sum.
        """
        return self._plane.arrived_nbytes(tag) if 0 < tag < TAG_LIMIT else 0

    def revoke(self, tag: int) -> Fence | None:
        """Closes a tag without waiting: no new write can land under it, and the returned ``Fence``
        tells when the writes under way have ended. None if the tag is neither open nor being
        closed."""
        check_tag(tag)
        revocation = self._plane.revoke_tag(tag)
        return None if revocation is None else Fence(tag, revocation, self._fences)

    def fence(self, tag: int, timeout_s: float = QUIESCE_TIMEOUT_S) -> int:
        """Closes a tag. After it returns, no write under the tag can land, whatever its source
        does.

        Returns the last value of ``arrived(tag)``; 0 if the tag was not open. Several threads may
        fence one tag at the same time.

        Raises:
            te.FenceTimeout: a write under way did not end within ``timeout_s`` seconds. The tag
                stays closed, but the memory must not be reused yet; call ``fence`` again.
        """
        fence = self.revoke(tag)
        return 0 if fence is None else fence.wait(timeout_s)

    def take_notes(self) -> list[Note]:
        """The notes that peers have sent since the last call (``Peer.send_note``), in the order in
        which they came. A peer need not be known here: it is one that has connected to this engine.

        Of one peer at most 8 MiB, or 8,192 notes, are kept until they are taken, and of all
        together 64 MiB. What comes beyond is dropped, and the log says so.
        """
        found, dropped = self._plane.take_notes()
        if dropped > self._notes_dropped:
            logger.warning(
                "%r: %d notes of peers were dropped: too many had come since they were last taken",
                self,
                dropped - self._notes_dropped,
            )
            self._notes_dropped = dropped
        return [Note(unpacked_peer(peer), data) for peer, data in found]

    def stats(self) -> Stats:
        """Counters since the start."""
        tallies = self._plane.tallies()
        changes = {one.name: one.rail_changes for one in self._transports}
        by_transport = {
            name: transport_stats(tally, *changes[name]) for name, tally in tallies.items()
        }
        outcomes = [one.outcomes for one in by_transport.values()]
        alive = self._live_peers()
        registered: Counter[str] = Counter()
        for region in self._memory.regions:
            registered[region.kind] += region.nbytes
        return Stats(
            bytes_sent=sum(one.bytes_sent for one in by_transport.values()),
            bytes_received=sum(one.bytes_received for one in by_transport.values()),
            transfers_done=sum(one.transfers_done for one in outcomes),
            transfers_failed=sum(sum(one.transfers_failed.values()) for one in outcomes),
            transfers_cancelled=sum(one.transfers_cancelled for one in outcomes),
            peers=len(alive),
            rails=sum(self._plane.connections()),
            transports=self._transports.names,
            peer_transports={one.id: (one.transport, one.transport_reason) for one in alive},
            peer_bytes_per_s={one.id: one.bytes_per_s for one in alive},
            by_transport=by_transport,
            fences=self._fences.stats(),
            connects=self._connects,
            connects_fallen_back=self._connects_fallen_back,
            registered_bytes=dict(registered),
        )

    def links(self) -> tuple[LinkStats, ...]:
        """The links that stand, of both directions, and what each has carried.

        Other threads may run between two of them: there may be hundreds, and each takes 15 µs."""
        found = []
        for peer in self._live_peers():
            found.append(peer.stats())
            time.sleep(0)  # gives the interpreter up; without, another thread waits for all of them
        return (*found, *self._acceptor.link_stats())

    def add_answers(self, answers: Mapping[str, Answer]) -> None:
        """More questions that this engine's status socket answers (``te.status``,
        ``Config.status_dir``), beside "engine"; a function gets the arguments of its question. They
        are called on the socket's own thread, one at a time."""
        self._answers |= answers

    @property
    def status_path(self) -> Path | None:
        """The status socket; None if there is none."""
        return None if self._status_socket is None else self._status_socket.path

    def _open_status(self) -> StatusSocket | None:
        """The engine works without one, too."""
        directory = self._config.status_dir
        if directory is None:
            return None
        try:
            return StatusSocket(directory, self._id, self._answers)
        except StatusSocketError as exc:
            logger.warning("te top and other programs cannot ask this engine how it is: %s", exc)
            return None

    def _status(self) -> EngineStatus:
        """The answer to "engine"."""
        host, port = self._acceptor.address
        links = sorted(self.links(), key=lambda one: one.nbytes, reverse=True)
        return EngineStatus(
            id=self._id,
            pid=os.getpid(),
            process=process_name(),
            host=host,
            port=port,
            stats=self.stats(),
            links=tuple(links[:LINKS_MAX]),
            label=self._config.label,
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
