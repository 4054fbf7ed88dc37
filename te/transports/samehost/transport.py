# SPDX-License-Identifier: Apache-2.0
"""The contract on one host: who may read whom, rails with rings, and memory that peers map."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from te.config import Config
from te.connect.dial import Dialled, add_rails, blame, greet, hello_to, insist
from te.connect.greeting import Hello
from te.core.wire import RAILS_LIMIT
from te.errors import Error, ProtocolViolation
from te.handshake import Card, decode_body, encode
from te.memory import Region, RegionTable
from te.memory_kinds import MemoryKind, Reach, kind_of
from te.memory_kinds.base import Exported, Mapped
from te.proof import Key
from te.transports.base import (
    Accepted,
    Answer,
    Call,
    Capabilities,
    IncomingLink,
    Join,
    Listener,
    Local,
    OutgoingLink,
    Transport,
    TransportRefused,
    Watch,
    Work,
)
from te.transports.samehost import reach
from te.transports.samehost._core import SamehostLink
from te.transports.samehost.messages import HostHello, HostWelcome, Nonce, Shared
from te.transports.samehost.process import Process, may_look_here, peer_pid, peer_process
from te.transports.samehost.sharing import Say, SharedMemory, Shares, Sharing

__all__ = ["SameHost"]

logger = logging.getLogger(__name__)

LISTEN_BACKLOG = 1024


@dataclass(frozen=True)
class _Rail(Dialled):
    """A welcomed connection with the memory file of its rings."""

    rings_fd: int

    def close(self) -> None:
        """Closes a connection that the plane does not get."""
        self.sock.close()
        os.close(self.rings_fd)


@dataclass(eq=False)
class _HostLink(IncomingLink):
    """A link whose bytes are copied out of a process."""

    handle: SamehostLink
    pid: int
    #: What that process has in its memory: all greetings of the link name it.
    nonce: Nonce
    #: The highest number of a greeting about memory.
    shared_number: int = 0
    #: What such greetings ask for is done one at a time.
    lock: threading.Lock = field(default_factory=threading.Lock)


class SameHost(Transport):
    """The destination copies; small blocks and words go through rings."""

    name: ClassVar = "samehost"
    capabilities: ClassVar = Capabilities(
        touches=Reach.CPU | Reach.KERNEL,
        stages=True,
        is_private=True,
        connections_max=RAILS_LIMIT,
    )
    has_listener: ClassVar = True

    _local: Local
    _sharing: Sharing

    def __init__(self, config: Config) -> None:
        """Nothing of the configuration is needed before there are connections."""
        #: What peers read of this process.
        self._memory: reach.NonceMemory | None = None
        self._problem: str | None = None
        try:
            self._memory = reach.NonceMemory()
        except OSError as exc:
            self._problem = (
                "cannot allocate memory that child processes do not inherit"
                f" (MADV_WIPEONFORK, Linux 4.14): {exc.strerror}"
            )
        self._listens = False

    def probe(self) -> str | None:
        """Whether a peer is on this host is not known before one is dialled."""
        return self._problem

    @property
    def _nonce(self) -> Nonce:
        assert self._memory is not None
        return self._memory.nonce

    def start(self, local: Local, watch: Watch) -> tuple[Listener, ...]:
        """Listens on an abstract socket."""
        self._local = local
        self._sharing = Sharing(functools.partial(_registered, local.memory))
        if not local.config.listens:
            return ()
        try:
            sock = reach.listen(local.id, LISTEN_BACKLOG)
        except OSError as exc:
            logger.warning("cannot listen on an abstract socket: %s", exc.strerror)
            return ()
        self._listens = True
        return (Listener(sock, _describe, takes_descriptor=True),)

    def offer(self) -> bytes | None:
        """The card has the engine's id already, after which the socket is named."""
        return b"" if self._listens else None

    # -- the source's side

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        number = secrets.randbits(62)

        def dial(session: Key | None = None) -> _Rail:
            with blame(card, _where(card), timeout_s):
                return insist(lambda: self._dial(card, number, deadline_s, session), deadline_s)

        first = dial()
        with contextlib.ExitStack() as undo:
            undo.callback(first.close)
            with blame(card, _where(card), timeout_s):
                process = peer_process(first.sock)
                if isinstance(process, str):
                    raise TransportRefused(process)
                # A file holds all of a region, and what lies beside it.
                may_look = may_look_here(first.sock)
                undo.callback(process.close)
                said = decode_body(first.welcome.body, HostWelcome)
                problem = reach.cannot_read(process, said.nonce)
                if problem is not None:
                    raise TransportRefused(problem)
                link = SamehostLink(
                    self._local.plane,
                    False,
                    process.pid,
                    process.pidfd,
                    said.nonce.address,
                    said.nonce.data,
                )
            undo.pop_all()
        add_rails(
            first,
            dial,
            self._local.config.rails,
            lambda one: link.add_rail(one.fileno(), one.rings_fd),
        )
        if may_look:
            say = _about_memory(self._local, self._nonce, card, number, first.session)
            self._share(Shares(link, say), deadline_s, timeout_s)
        return OutgoingLink(link)

    def _share(self, shares: Shares, deadline_s: float, timeout_s: float) -> None:
        def share_handles() -> None:
            try:
                self._sharing.share_handles(shares, time.monotonic() + timeout_s)
            except Exception:
                logger.exception(
                    "internal error while memory was shared with a peer; transfers use slower "
                    "copies"
                )

        self._sharing.attach(shares)
        self._sharing.share_files(shares, deadline_s)
        if any(memory.export.handles for memory in _registered(self._local.memory)):
            self._local.run(share_handles)

    def _dial(self, card: Card, number: int, deadline_s: float, session: Key | None) -> _Rail:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        hello = _hello(self._local, self._nonce, card, number)
        with contextlib.ExitStack() as undo:
            try:
                sock = reach.dial(card, left_s)
            except (ConnectionRefusedError, PermissionError):
                raise TransportRefused(f"no engine {card.id} on this host") from None
            undo.callback(sock.close)
            rings_fd = reach.make_rings()
            undo.callback(os.close, rings_fd)
            dialled = greet(
                self._local,
                sock,
                hello,
                card,
                _where(card),
                deadline_s,
                [rings_fd],
                session,
                lambda: _let_read(peer_pid(sock)),
            )
            undo.pop_all()
            return _Rail(**vars(dialled), rings_fd=rings_fd)

    # -- memory that peers map

    def share(self, region: Region, timeout_s: float) -> None:
        """Peers may map what ``te.allocate`` made, and what its kind exports."""
        for memory in _shared_memory(region):
            self._sharing.add(memory, timeout_s)

    def unshare(self, region: Region, timeout_s: float) -> None:
        """After it returns no live link has it mapped."""
        for memory in _shared_memory(region):
            self._sharing.remove(memory, timeout_s)

    # -- the destination's side

    def accept(self, call: Call, link: IncomingLink | None) -> Accepted:
        """See ``Transport.accept``."""
        assert link is None or isinstance(link, _HostLink)
        said = decode_body(call.body, HostHello)
        if link is not None and said.nonce != link.nonce:
            raise TransportRefused("the link that it names has another nonce")
        if said.shared is not None:
            return _about_shared(call, link, said.shared, self._local.memory.mappers)
        if not call.fds:
            raise ProtocolViolation("a rail on the same host without memory for its rings")
        return _Join(
            self, self._local, call, link, said.nonce, encode(HostWelcome(nonce=self._nonce))
        )


@dataclass
class _Join(Join):
    may_block: ClassVar = True  # The other side's memory may not answer.

    transport: SameHost
    local: Local
    call: Call
    link: _HostLink | None
    #: The other side's.
    nonce: Nonce
    answer: bytes
    process: Process | None = field(default=None, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    is_closed: bool = field(default=False, init=False)

    def check(self) -> bytes:
        """Whether the process may be copied from."""
        process = peer_process(self.call.sock)
        if isinstance(process, str):
            raise TransportRefused(process)
        with contextlib.ExitStack() as undo:
            undo.callback(process.close)
            if self.link is not None:
                _check_pid(self.link, process.pid)
            problem = reach.cannot_read(process, self.nonce)
            if problem is not None:
                raise TransportRefused(problem)
            _let_read(process.pid)
            with self.lock:
                if self.is_closed:
                    raise TransportRefused("the connection was closed meanwhile")
                self.process = process
            undo.pop_all()
        return self.answer

    def begin(self) -> IncomingLink:
        assert self.process is not None
        pidfd = os.dup(self.process.pidfd)
        pid, nonce = self.process.pid, self.nonce
        handle = SamehostLink(self.local.plane, True, pid, pidfd, nonce.address, nonce.data)
        key, where = self.call.key, self.call.where
        return _HostLink(handle, key, self.transport, where, pid, nonce)

    def add(self, link: IncomingLink) -> bool:
        assert isinstance(link, _HostLink)
        return link.handle.add_rail(self.call.sock.fileno(), self.call.fds[0])

    def close(self) -> None:
        with self.lock:
            self.is_closed = True
            process, self.process = self.process, None
        if process is not None:
            process.close()


def _let_read(pid: int) -> None:
    """Lets a process that has proved itself read this one's memory; ``TransportRefused``."""
    problem = reach.READERS.allow(pid)
    if problem is not None:
        raise TransportRefused(problem)


def _hello(
    local: Local, nonce: Nonce, card: Card, number: int, shared: Shared | None = None
) -> Hello:
    body = encode(HostHello(nonce=nonce, shared=shared))
    return hello_to(card, local, SameHost.name, number, body)


def _about_memory(local: Local, nonce: Nonce, card: Card, number: int, session: Key) -> Say:
    """Tells the engine about memory of this one, for the link ``number``."""

    def say(
        memory: SharedMemory, turn: int, part: Exported | None, deadline_s: float
    ) -> str | None:
        timeout_s = max(deadline_s - time.monotonic(), 0.001)
        shared = _word(memory, turn, part)
        hello = _hello(local, nonce, card, number, shared)
        fds = [] if part is None or part.fd is None else [part.fd]
        where = _where(card)
        try:
            with blame(card, where, timeout_s), reach.dial(card, timeout_s) as sock:
                greet(local, sock, hello, card, where, deadline_s, fds, session)
        except Error as exc:
            return str(exc)
        return None

    return say


def _about_shared(
    call: Call,
    link: _HostLink | None,
    shared: Shared,
    mappers: Callable[[str], tuple[MemoryKind, ...]],
) -> Answer | Work:
    """Maps memory of the source, or unmaps it."""
    if link is None:
        raise TransportRefused("no such link")
    _check_pid(link, peer_pid(call.sock))
    if shared.number <= link.shared_number:
        raise TransportRefused("a later greeting about memory came first")
    link.shared_number = shared.number
    if shared.handles:
        kinds = mappers(shared.handles)
        if link.pid == os.getpid():  # What is this process's own needs no mapping.
            kinds = tuple(kind for kind in kinds if kind is kind_of(shared.address))
        if not kinds:
            raise TransportRefused(f"no memory here is copied by {shared.handles}")
        # A driver may take its time.
        return Work("mapping memory", lambda: _map(link, kinds[0], shared))
    if not call.fds:
        # A copy out of it may have to be waited for.
        return Work("unmapping memory", lambda: _unmap(link, shared.serial))
    try:
        link.handle.add_mapping(shared.serial, shared.address, call.fds[0], shared.nbytes)
    except OSError as exc:
        raise TransportRefused(f"cannot map {shared.nbytes} bytes: {exc.strerror}") from exc
    return Answer("mapping memory")


def _map(link: _HostLink, kind: MemoryKind, shared: Shared) -> bytes:
    """Maps the peer's memory by its kind."""
    mapped = Mapped(shared.address, 0, shared.nbytes)
    with link.lock:
        if shared.number != link.shared_number:
            raise TransportRefused("a later greeting about memory came first")
        try:
            link.handle.check_mapping(shared.address, shared.nbytes, 0)
            if link.pid != os.getpid():
                mapped = kind.map(shared.handle, shared.nbytes, link.handle.take_descriptor)
            link.handle.add_mapped(
                shared.serial,
                shared.address,
                shared.nbytes,
                kind.compiled,
                mapped.address,
                mapped.number,
                mapped.nbytes,
            )
        except (OSError, ValueError) as exc:
            why = exc.strerror if isinstance(exc, OSError) else exc
            raise TransportRefused(f"cannot map {shared.nbytes} bytes: {why}") from exc
    return b""


def _unmap(link: _HostLink, serial: int) -> bytes:
    with link.lock:
        if not link.handle.remove_mapping(serial):
            raise TransportRefused("a copy out of it did not end")
    return b""


def _check_pid(link: _HostLink, pid: int) -> None:
    if link.pid != pid:
        raise TransportRefused(f"the link that it names is of process {link.pid}")


def _describe(sock: socket.socket, _address: Any) -> tuple[str, str]:
    where = f"process {peer_pid(sock)}"
    return where, where


def _where(card: Card) -> str:
    return f"the abstract socket of {card.id}"


def _registered(table: RegionTable) -> tuple[SharedMemory, ...]:
    """What peers may map now."""
    return tuple(memory for region in table.regions for memory in _shared_memory(region))


def _shared_memory(region: Region) -> tuple[SharedMemory, ...]:
    """None of one that peers cannot map."""
    if region.export is None:
        return ()
    return (SharedMemory(region.serial, region.address, region.nbytes, region.export),)


def _word(memory: SharedMemory, turn: int, part: Exported | None) -> Shared:
    if part is None:
        return Shared(memory.address, memory.nbytes, memory.serial, turn)
    handles = memory.export.handles
    return Shared(part.address, part.nbytes, memory.serial, turn, handles, part.handle)
