# SPDX-License-Identifier: Apache-2.0
"""The source's side: one thread that sends on every outgoing connection."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from te.blocks import Blocks
from te.config import Config
from te.errors import ProtocolViolation, QueueFull
from te.transfers import Status, Transfer
from te.transports.base import Rail
from te.transports.tcp.loop import READABLE, WRITABLE, IoLoop
from te.transports.tcp.segments import Segments
from te.transports.tcp.syscalls import IOVEC, Iovecs, receive_into
from te.transports.tcp.wire import (
    DESTINATION_FRAMES,
    FRAME,
    LANDING,
    Ack,
    AckStatus,
    FrameReader,
    encode_abandon,
    encode_end,
    encode_segment_header,
)

__all__ = ["Connection", "Sender"]

logger = logging.getLogger(__name__)

# Calls on one connection before the others get their turn.
CALLS_PER_TURN = 8
PADDING = np.zeros(256 << 10, np.uint8)


@dataclass(eq=False)
class _Job:
    """A transfer on its way."""

    id: int
    transfer: Transfer
    blocks: Blocks
    tag: int
    #: Cut when its turn comes.
    segments: Segments | None = None
    #: END or ABANDON is loaded or sent: no segment follows.
    closed: bool = False
    #: Why it cannot be done whatever the destination says.
    spoiled: str | None = None


class Sender:
    """All outgoing connections of an engine."""

    def __init__(self, name: str, config: Config) -> None:
        self.config = config
        self.bytes_sent = 0
        self._connections: set[Connection] = set()
        self.loop = IoLoop(name, self._on_tick, self._on_end)
        self.loop.start()

    @property
    def rails(self) -> int:
        """Connections in use."""
        return len(self._connections)

    def adopt(self, sock: socket.socket, label: str) -> Connection:
        """Takes over a welcomed, non-blocking socket; ``label`` names the peer in reasons."""
        if self.config.socket_buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.config.socket_buffer_bytes)
        connection = Connection(self, sock, label)
        # Before the call, so that a loop which ends meanwhile finds it here.
        self._connections.add(connection)
        if not self.loop.call(connection.watch):
            connection.die(self.loop.end_reason)
        return connection

    def forget(self, connection: Connection) -> None:
        """A connection has died. Loop's thread only."""
        self._connections.discard(connection)

    def _on_tick(self, now_s: float) -> float | None:
        next_s = None
        for connection in tuple(self._connections):
            deadline_s = connection.check_stall(now_s)
            if deadline_s is not None:
                next_s = deadline_s if next_s is None else min(next_s, deadline_s)
        return next_s

    def _on_end(self, reason: str) -> None:
        for connection in tuple(self._connections):
            connection.die(reason)


class Connection(Rail):
    """One connection to one peer. ``submit``, ``recheck``, ``close`` and ``alive`` are for any
    thread; everything else belongs to the loop's thread."""

    def __init__(self, sender: Sender, sock: socket.socket, label: str) -> None:
        self._sender = sender
        self._sock = sock
        self._label = label
        self._lock = threading.Lock()
        # Under the lock: submitted transfers, how many have no outcome, whether the loop knows.
        self._queue: deque[_Job] = deque()
        self._unfinished = 0
        self._called = False
        self._death: str | None = None
        # The loop's own.
        self._next_id = 1
        self._active: _Job | None = None
        self._unacknowledged: dict[int, _Job] = {}
        self._iovecs = Iovecs()
        self._head: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._loaded_nbytes = 0
        self._reader = FrameReader(DESTINATION_FRAMES)
        self._watched = 0
        self._progress_s = time.monotonic()

    # -- any thread

    @property
    def alive(self) -> bool:
        return self._death is None

    def submit(self, transfer: Transfer, blocks: Blocks, tag: int) -> None:
        limit = self._sender.config.max_queued_transfers
        with self._lock:
            death = self._death
            if death is None:
                if self._unfinished >= limit:
                    raise QueueFull(f"{self._label} has {limit} unfinished transfers")
                if not self._unfinished:
                    self._progress_s = time.monotonic()
                self._unfinished += 1
                self._queue.append(_Job(self._next_id, transfer, blocks, tag))
                self._next_id += 1
        if death is not None:
            transfer.settle(Status.FAILED, death)
        else:
            self._call()

    def recheck(self) -> None:
        self._call()

    def close(self, reason: str) -> None:
        self._sender.loop.call(lambda: self.die(reason))

    def _call(self) -> None:
        with self._lock:
            if self._called:
                return
            self._called = True
        self._sender.loop.call(self._on_call)

    # -- loop's thread

    def watch(self) -> None:
        """Begins to wait for the socket."""
        if self.alive:
            self._watched = READABLE
            self._sender.loop.watch(self._sock.fileno(), READABLE, self._on_ready)
            self._pump()

    def check_stall(self, now_s: float) -> float | None:
        """Dies if nothing moved for too long; else returns when to look again, if ever."""
        if not self._unfinished:
            return None
        stall_s = self._sender.config.stall_timeout_s
        if now_s - self._progress_s > stall_s:
            # This process itself may have been frozen: only silence after one more try counts.
            self._on_ready(READABLE)
            if self.alive and now_s - self._progress_s > stall_s:
                self.die(f"{self._label} made no progress for {stall_s} s")
        return self._progress_s + stall_s if self.alive and self._unfinished else None

    def die(self, reason: str) -> None:
        """Closes the connection and fails what is unfinished. Idempotent."""
        with self._lock:
            if self._death is not None:
                return
            self._death = reason
            jobs = [*self._unacknowledged.values(), *self._queue]
            self._queue.clear()
        if self._watched:
            self._sender.loop.forget(self._sock.fileno())
        self._sock.close()
        self._sender.forget(self)
        if self._active is not None:
            jobs.append(self._active)
        for job in {job.id: job for job in jobs}.values():
            asked = "cancelling could not be confirmed: " if job.transfer.cancel_requested else ""
            self._settle(job, Status.FAILED, asked + (job.spoiled or reason))

    def _on_call(self) -> None:
        cancelled: list[_Job] = []
        with self._lock:
            self._called = False
            waiting, self._queue = self._queue, deque()
            for job in waiting:
                (cancelled if job.transfer.cancel_requested else self._queue).append(job)
        for job in cancelled:
            self._settle(job, Status.CANCELLED)
        if self._watched and self.alive:
            self._pump()

    def _on_ready(self, events: int) -> None:
        try:
            if events & ~WRITABLE:
                self._read()
            if self.alive:
                self._pump()
        except ProtocolViolation as exc:
            logger.warning("%s broke the protocol: %s", self._label, exc)
            self.die(f"{self._label} broke the protocol: {exc}")

    def _read(self) -> None:
        while self.alive:
            try:
                nbytes = receive_into(self._sock.fileno(), self._reader.room())
            except BlockingIOError:
                return
            except OSError as exc:
                self.die(f"the connection to {self._label} broke: {exc.strerror}")
                return
            if not nbytes:
                self.die(f"{self._label} closed the connection")
                return
            self._progress_s = time.monotonic()
            frame = self._reader.filled(nbytes)
            if frame is not None:
                assert isinstance(frame, Ack)
                self._on_ack(frame)

    def _on_ack(self, ack: Ack) -> None:
        job = self._unacknowledged.get(ack.transfer)
        if job is None or (ack.status is not AckStatus.REFUSED and not job.closed):
            raise ProtocolViolation(
                f"transfer {ack.transfer}, acknowledged as {ack.status.name}, is not waiting for it"
            )
        del self._unacknowledged[ack.transfer]
        if ack.status is AckStatus.LANDED:
            self._settle(job, Status.DONE)
        elif ack.status is AckStatus.REFUSED:
            job.spoiled = f"{self._label} refused: {ack.reason}"
            # While it is being sent its memory is in use; _finish_load then settles it.
            if job is not self._active:
                self._settle(job, Status.FAILED, job.spoiled)
        elif job.spoiled is not None:
            self._settle(job, Status.FAILED, job.spoiled)
        else:
            self._settle(job, Status.CANCELLED)

    def _pump(self) -> None:
        for _ in range(CALLS_PER_TURN):
            if not self._iovecs.remaining and not self._load():
                self._watch_for(READABLE)
                return
            try:
                self._iovecs.send(self._sock.fileno())
            except BlockingIOError:
                break
            except OSError as exc:
                if exc.errno == errno.EFAULT:
                    self._pad(exc.strerror or "")
                    continue
                self.die(f"the connection to {self._label} broke: {exc.strerror}")
                return
            self._progress_s = time.monotonic()
            if not self._iovecs.remaining:
                self._finish_load()
        self._watch_for(READABLE | WRITABLE)

    def _watch_for(self, events: int) -> None:
        if events != self._watched:
            self._watched = events
            self._sender.loop.rewatch(self._sock.fileno(), events)

    def _load(self) -> bool:
        """Prepares what is sent next; False when there is nothing."""
        if self._active is None:
            with self._lock:
                if not self._queue:
                    return False
                job = self._active = self._queue.popleft()
            self._unacknowledged[job.id] = job
        job = self._active
        if job.segments is None:
            config = self._sender.config
            job.segments = Segments(job.blocks, config.segment_blocks, config.segment_bytes)
        if job.spoiled is not None or job.transfer.cancel_requested:
            job.closed = True
            self._load_head(encode_abandon(job.id), None, b"")
        elif job.segments.exhausted:
            job.closed = True
            self._load_head(encode_end(job.id, job.tag, 0), None, b"")
        else:
            blocks = job.segments.take()
            end = b""
            if job.segments.exhausted:
                job.closed = True
                end = encode_end(job.id, job.tag, job.blocks.total_nbytes)
            self._load_segment(job, blocks, end)
        return True

    def _load_segment(self, job: _Job, blocks: npt.NDArray[np.void], end: bytes) -> None:
        landings = np.empty(len(blocks), LANDING)
        landings["dst"], landings["nbytes"] = blocks["dst"], blocks["nbytes"]
        nbytes = int(landings["nbytes"].sum())
        head = encode_segment_header(job.id, job.tag, len(blocks), nbytes) + landings.tobytes()
        self._load_head(head, blocks, end)
        self._loaded_nbytes = nbytes

    def _load_head(self, head: bytes, blocks: npt.NDArray[np.void] | None, tail: bytes) -> None:
        """Loads ``head``, the memory of ``blocks`` and ``tail`` to be sent in this order."""
        self._head = np.frombuffer(head + tail, np.uint8)
        self._loaded_nbytes = 0
        count = 0 if blocks is None else len(blocks)
        ranges = np.empty(1 + count + bool(tail), IOVEC)
        address = self._head.ctypes.data
        ranges[0] = (address, len(head))
        if blocks is not None:
            ranges["base"][1 : 1 + count] = blocks["src"]
            ranges["nbytes"][1 : 1 + count] = blocks["nbytes"]
        if tail:
            ranges[-1] = (address + len(head), len(tail))
        self._iovecs.load(ranges)

    def _finish_load(self) -> None:
        self._sender.bytes_sent += self._loaded_nbytes
        job = self._active
        assert job is not None
        if not job.closed:
            return
        self._active = None
        if job.id not in self._unacknowledged:
            assert job.spoiled is not None
            self._settle(job, Status.FAILED, job.spoiled)

    def _pad(self, cause: str) -> None:
        """Source memory vanished in the middle of a segment: send something else in its place,
        so that the connection stays in step, then give the transfer up."""
        job = self._active
        assert job is not None
        job.spoiled = f"the source memory cannot be read: {cause}"
        left = self._iovecs.remaining - (FRAME.size if job.closed else 0)
        job.closed = False  # An END that was loaded behind the segment gives way to an ABANDON.
        # The kernel takes back a header that it was given together with the bad memory.
        header = self._iovecs.rest()[: left > self._loaded_nbytes]
        left = min(left, self._loaded_nbytes)
        ranges = np.empty(-(-left // PADDING.size), IOVEC)
        ranges["base"] = PADDING.ctypes.data
        ranges["nbytes"] = PADDING.size
        ranges["nbytes"][-1] = left - (len(ranges) - 1) * PADDING.size
        self._loaded_nbytes = 0
        self._iovecs.load(np.concatenate([header, ranges]))

    def _settle(self, job: _Job, status: Status, reason: str | None = None) -> None:
        with self._lock:
            self._unfinished -= 1
        job.transfer.settle(status, reason)
