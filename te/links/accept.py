# SPDX-License-Identifier: Apache-2.0
"""The destination's side: a thread that accepts and greets, and hands connections to the plane."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from te.config import Config
from te.errors import ListenError
from te.handshake import Hello, RailAnswer, RailOffer
from te.links import samehost
from te.links.admission import Admission, HalfOpen
from te.links.cm import CmAcceptor
from te.links.devices import DeviceWatch
from te.links.dial import address_text
from te.links.direct import accept_rail, far_nic
from te.links.incoming import Greeted, Incoming
from te.links.local import Local
from te.links.loop import READABLE, IoLoop
from te.links.process import Process, peer_pid
from te.links.throttle import Throttle
from te.plane._core import LinkHandle, Revocation
from te.plane.reasons import Reason, sentence

__all__ = ["Acceptor"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024
# In a row: a flood of connections must not keep those from being read that are there.
ACCEPTS_PER_TURN = 64
# After accept(2) failed for want of descriptors or memory, and nothing could be closed for it.
ACCEPT_PAUSE_S = 1.0
# Connections that wait for their end of a rail: the threads that make them are fewer.
BUILDING_MAX = 256


@dataclass
class _Link:
    """Rails that one source opened together."""

    handle: LinkHandle
    engine_id: str
    where: str
    #: On the same host, the process whose memory is copied; else 0.
    pid: int
    is_direct: bool
    #: The highest number of a greeting about memory.
    shared_number: int = 0


class Acceptor:
    """The listening sockets of an engine, and its incoming links."""

    def __init__(self, name: str, local: Local) -> None:
        """Listens and starts the thread; ``te.ListenError`` when it cannot."""
        self.local = local
        self._lock = threading.Lock()
        #: By the source's id and the number in its greetings; under the lock.
        self._links: dict[tuple[str, int, int], _Link] = {}
        self._greeting: set[Incoming] = set()
        self._admission = Admission()
        self._half_open: dict[HalfOpen, Incoming] = {}
        self._throttle = Throttle()
        listener = _listen(local.config)
        host, port = listener.getsockname()[:2]
        #: Numeric host and port this engine listens on.
        self.address: tuple[str, int] = (host, port)
        self._listeners = {listener.fileno(): listener}
        #: What sources on this host try to read.
        self._memory = samehost.NonceMemory()
        self.nonce = self._memory.nonce
        #: Why peers cannot use the same host's transport; None if they can.
        self.samehost_problem: str | None = None
        if "samehost" in local.config.transports:
            self._listen_samehost()
        self.loop = IoLoop(name, self._on_tick, self._on_end)
        self._cm = CmAcceptor(local, self._watch)
        for fd in self._listeners:
            self.loop.watch(fd, READABLE, lambda _, fd=fd: self._on_ready(fd))  # type: ignore[misc]
        self.loop.watch(local.plane.events_fd, READABLE, self._on_events)
        for nic in () if local.fabric is None else local.fabric.nics:
            watch = DeviceWatch(local, nic)
            self.loop.watch(nic.device.events_fd, READABLE, watch.on_ready)
        self.loop.start()

    def fence(self, engine_id: str, timeout_s: float) -> int | None:
        """Ends that engine's links; how many, or None when a landing did not end in time."""
        with self._lock:
            fenced = [
                one for one in self._links.values() if one.engine_id == engine_id
                and not one.handle.ended
            ]  # fmt: skip
        for one in fenced:
            one.handle.fence()
        until_s = time.monotonic() + timeout_s
        for one in fenced:
            if not one.handle.quiesce(max(until_s - time.monotonic(), 0.0)):
                return None
            if one.is_direct and not one.handle.break_pairs(until_s - time.monotonic()):
                return None
        for one in fenced:
            one.handle.die(Reason.FENCED)
        return len(fenced)

    def log(self, level: int, message: str, *values: object) -> None:
        """A line about a stranger, unless there were too many of late. Loop's thread only."""
        if logger.isEnabledFor(level) and self._throttle.admits(time.monotonic()):
            dropped = self._throttle.take_dropped()
            logger.log(level, message, *values)
            if dropped:
                logger.log(level, "%d more such lines were left out", dropped)

    def introduced(self, half_open: HalfOpen) -> None:
        """A connection's hello is whole, or it was closed. Loop's thread only."""
        self._admission.leave(half_open)
        self._half_open.pop(half_open, None)

    def forget(self, incoming: Incoming) -> None:
        """A connection was closed or handed over. Loop's thread only."""
        self._greeting.discard(incoming)

    def limit(self) -> str | None:
        """Why no more connections become rails; None if they may."""
        limit = self.local.config.max_connections
        rails_in = self.local.plane.counters()[3]
        return f"{limit} connections are open already" if rails_in >= limit else None

    def misfit(self, hello: Hello, process: Process | None) -> str | None:
        """Why a connection, on the same host of that process, cannot be a rail of the link that its
        hello names; None if it can."""
        pid = 0 if process is None else process.pid
        with self._lock:
            link = self._links.get((hello.id, hello.epoch, hello.link))
        if link is None:
            return "a link whose process is not known" if pid and hello.nonce is None else None
        if (bool(link.pid), link.is_direct) != (bool(pid), hello.is_direct):
            return "the link that it names is over another transport"
        if link.pid != pid:
            return f"the link that it names is of process {link.pid}"
        rails = 1 if link.is_direct else self.local.config.rails
        return None if link.handle.rails < rails else f"{link.handle.rails} rails are open already"

    def greeted(self, greeted: Greeted) -> str | None:
        """Takes a connection whose hello was good, and its rings, into its link; or why that cannot
        be (then nothing was taken)."""
        hello, plane = greeted.hello, self.local.plane
        key = (hello.id, hello.epoch, hello.link)
        with self._lock:
            link = self._links.get(key)
        if link is None:
            pid, pidfd = 0, -1
            if greeted.process is not None:
                pid, pidfd = greeted.process.pid, os.dup(greeted.process.pidfd)
            handle = plane.link(True, pid > 0, pid, hello.is_direct, pidfd)
            link = _Link(handle, hello.id, greeted.where, pid, hello.is_direct)
        try:
            added = link.handle.add_rail(greeted.sock.fileno(), greeted.rings_fd)
        except OSError as exc:
            link.handle.die(Reason.PEER_CLOSED)
            return exc.strerror
        if not added:
            return "the link has ended"
        greeted.sock.detach()
        with self._lock:
            if len(self._links) > 2 * self.local.config.max_connections:
                # The plane tells of each that ends, but loses what is not listened to.
                self._links = {key: one for key, one in self._links.items() if one.handle.alive}
            self._links[key] = link
        return None

    def begin_rail(self, hello: Hello) -> str | None:
        """Whether a rail over RDMA may be made for a link; or why that cannot be."""
        with self._lock:
            link = self._links.get((hello.id, hello.epoch, hello.link))
        if link is None or not link.is_direct:
            return "no such link"
        building = len(self._greeting) - len(self._admission)
        return f"{building} rails are being made" if building > BUILDING_MAX else None

    def make_rail(self, hello: Hello, offer: RailOffer) -> RailAnswer | str:
        """This side's end of a rail over RDMA; or why that cannot be. Any thread; blocks while the
        kernel looks for the other side's hardware address (a second, if an ARP request is lost)."""
        with self._lock:
            link = self._links.get((hello.id, hello.epoch, hello.link))
        if link is None or not link.is_direct:
            return "no such link"
        try:
            nic = far_nic(self.local, offer)
            if nic.family == "iwarp":
                return self._cm.expect(link.handle, offer, nic)
            return accept_rail(self.local, link.handle, offer, nic)
        except OSError as exc:
            return exc.strerror or str(exc)

    def break_grants(self, revocation: Revocation) -> None:
        """Has the rails end over which peers may still be writing under a tag that was revoked; the
        revocation says when they have."""
        with self._lock:
            links = [one.handle for one in self._links.values() if one.is_direct]
        for one in links:
            if one.has_grant(revocation):
                one.break_pairs(0.0)

    def begin_shared(self, hello: Hello, pid: int) -> _Link | str:
        """The link whose memory a greeting of the process ``pid`` is about; or why it counts
        nothing. Loop's thread only."""
        with self._lock:
            link = self._links.get((hello.id, hello.epoch, hello.link))
        if link is None or not link.pid or hello.shared is None:
            return "no such link"
        if link.pid != pid:
            return f"the link that it names is of process {link.pid}"
        if hello.shared.number <= link.shared_number:
            return "a later greeting about memory came first"
        link.shared_number = hello.shared.number
        return link

    def _watch(self, fd: int, handler: Callable[[int], None]) -> None:
        self.loop.call(lambda: self.loop.watch(fd, READABLE, handler))

    # -- loop's thread

    def _listen_samehost(self) -> None:
        try:
            listener = samehost.listen(self.local.id, LISTEN_BACKLOG)
        except OSError as exc:
            self.samehost_problem = f"cannot listen on an abstract socket: {exc.strerror}"
            logger.warning("%s", self.samehost_problem)
            return
        self._listeners[listener.fileno()] = listener

    def _on_ready(self, fd: int) -> None:
        listener = self._listeners[fd]
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # It gave up while it waited in the backlog; accept(2).
            except OSError as exc:
                if self._give_up_one(str(exc)):
                    continue
                self.log(logging.WARNING, "cannot accept connections, pausing: %s", exc.strerror)
                self.loop.pause(fd, ACCEPT_PAUSE_S)
                return
            try:
                self._admit(sock, peer)
            except Exception:
                sock.close()
                raise

    def _admit(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        sock.setblocking(False)
        is_samehost = sock.family == socket.AF_UNIX
        if is_samehost:
            where = source = f"process {peer_pid(sock)}"
        else:
            where, source = address_text(peer[0], peer[1]), peer[0]
        timeout_s = self.local.config.connect_timeout_s
        half_open = self._admission.enter(source, time.monotonic(), timeout_s)
        incoming = Incoming(self, sock, where, is_samehost, half_open)
        self._half_open[half_open] = incoming
        self._greeting.add(incoming)
        self.loop.watch(sock.fileno(), READABLE, incoming.on_ready)
        # Mostly its hello is here already: it is not half-open for longer than this.
        incoming.on_ready(READABLE)
        while (surplus := self._admission.surplus(time.monotonic())) is not None:
            self._give_up(surplus, "too many connections say nothing")

    def _give_up(self, half_open: HalfOpen, reason: str) -> None:
        """Closes a connection for others, unless it has said something by now."""
        incoming, had_spoken = self._half_open[half_open], half_open.has_spoken
        incoming.on_ready(READABLE)
        if half_open in self._half_open and half_open.has_spoken == had_spoken:
            incoming.close(reason)

    def _give_up_one(self, reason: str) -> bool:
        """After accept(2) failed for that reason; whether there is one connection less."""
        before = len(self._admission)
        sacrifice = self._admission.sacrifice(time.monotonic())
        if sacrifice is not None:
            self._give_up(sacrifice, reason)
        return len(self._admission) < before

    def _on_tick(self, now_s: float) -> float | None:
        times = [incoming.check_deadline(now_s) for incoming in tuple(self._greeting)]
        return min(times, default=None)

    def _on_events(self, _events: int) -> None:
        for number, rail, epoch, code, errnum, text in self.local.plane.events():
            self.local.keeper.on_event(number, rail, epoch, code, errnum)
            if rail >= 0:
                continue
            with self._lock:
                keys = [key for key, one in self._links.items() if one.handle.number == number]
                link = self._links.pop(keys[0]) if keys else None
            who = f"{link.where} ({link.engine_id})" if link else f"link {number}"
            reason = sentence(who, code, errnum, text, self.local.config.stall_timeout_s)
            level = logging.WARNING if code == Reason.VIOLATED else logging.INFO
            logger.log(level, "a link ended: %s", reason)

    def _on_end(self, reason: str) -> None:
        for listener in self._listeners.values():
            listener.close()
        for incoming in tuple(self._greeting):
            incoming.close(reason)


def _listen(config: Config) -> socket.socket:
    host, port, buffer_bytes = config.host, config.port, config.socket_buffer_bytes
    where = address_text(host, port)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ListenError(f"cannot listen on {where}: {exc.strerror}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it, and it must be known before listen(2) to set the window.
        if buffer_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        sock.bind(address)
        sock.listen(LISTEN_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ListenError(f"cannot listen on {where}: {exc.strerror}") from exc
    sock.setblocking(False)
    return sock
