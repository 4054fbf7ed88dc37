# SPDX-License-Identifier: Apache-2.0
"""The contract of a transport's Python half: what ``te.connect`` and the engine ask of it.

A transport is made from the configuration, looks whether it can be used (``probe``), begins
(``start``) and puts an ``offer`` on the engine's card. The engine that dials has it ``open`` a link
from the other's offer; at the engine that was dialled, each greeting that names the transport comes
to its ``accept``. What the two halves say to each other meanwhile are bodies of MessagePack that
nobody else looks into: a struct in the transport's folder, at most ``te.handshake.BODY_BYTES_MAX``.
From then on the compiled half moves bytes.

Calls into the compiled half that are particular to a transport are in its folder; what all have in
common is in ``OutgoingLink`` and ``IncomingLink``.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from te.blocks import Blocks
from te.config import Config
from te.core.engine import Engine as Plane
from te.core.handles import LinkHandle, TransferHandle
from te.errors import ConnectError
from te.handshake import Card
from te.memory import Region, RegionTable
from te.memory_kinds import Reach
from te.proof import Key
from te.reasons import Reason
from te.stats import RailStats, flows_of
from te.verbs.fabric import Fabric

__all__ = [
    "Accepted",
    "Answer",
    "Call",
    "Capabilities",
    "IncomingLink",
    "Join",
    "LinkKey",
    "Listener",
    "Local",
    "OutgoingLink",
    "PlainJoin",
    "Transport",
    "TransportRefused",
    "Watch",
    "Work",
    "plain_rails",
]


class TransportRefused(ConnectError):
    """The engine answers, but this transport cannot be used between the two, for this reason.
    Another may. ``for_good``: so will the next attempt be, until one of them is started anew."""

    def __init__(self, reason: str, *, for_good: bool = False) -> None:
        self.for_good = for_good
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What callers need to know of a transport, instead of its name."""

    #: What of the machine reads and writes memory for it: it moves memory that all of that reaches
    #: (``te.memory_kinds.MemoryKind.reach``) where it lies, without a copy.
    touches: Reach
    #: Whether it carries other memory through staging, if the memory's kind has a copier.
    stages: bool = False
    #: Whether it works with ``Config.encrypt``: what it carries stays on the host, or is encrypted.
    is_private: bool
    #: Rails that may be connections which ``te.connect`` makes; others the transport makes itself.
    connections_max: int


@dataclass(frozen=True)
class Local:
    """The engine as its transports see it."""

    id: str
    epoch: int
    config: Config
    plane: Plane
    memory: RegionTable
    #: For the proofs in greetings; any is accepted, and the first is preferred. Never empty.
    keys: tuple[Key, ...]
    #: Has a function that may block run on another thread; False when the engine was closed.
    run: Callable[[Callable[[], None]], bool]


Watch: TypeAlias = Callable[[int, Callable[[int], None]], None]
"""``watch(fd, handler)`` has the handler called, on the engine's accepting thread, with the ready
events whenever the descriptor is readable, until it is closed. Any thread."""


@dataclass(frozen=True)
class Listener:
    """A socket by which greetings come."""

    #: Listening and non-blocking.
    sock: socket.socket
    #: Gets a connection and its address; returns where the connection is from, for the log, and
    #: the source that has to share a limit of connections that say nothing.
    describe: Callable[[socket.socket, Any], tuple[str, str]]
    #: Whether a hello may bring a descriptor (SCM_RIGHTS in unix(7)).
    takes_descriptor: bool = False


class LinkKey(NamedTuple):
    """What the greetings of one link have in common."""

    engine_id: str
    epoch: int
    number: int


# -- the source's side


@dataclass(eq=False)
class OutgoingLink:
    """A link that this engine opened. Any thread may call anything."""

    handle: LinkHandle

    @property
    def alive(self) -> bool:
        """Whether transfers have a chance."""
        return self.handle.alive

    @property
    def rails(self) -> int:
        """Rails that work."""
        return self.handle.rails

    @property
    def encrypted_by(self) -> str:
        """``"kernel"`` or ``"libcrypto"``; empty if what it carries is not encrypted."""
        return ""

    @property
    def bytes_per_s(self) -> float:
        """What its devices or its interface carry at best; 0.0 if nobody tells."""
        return 0.0

    @property
    def rail_names(self) -> tuple[str, ...]:
        """What each rail leads over, as far as it is known."""
        return ()

    def rail_stats(self, flows: list[tuple[int, int]]) -> tuple[RailStats, ...]:
        """Each rail; ``flows``: what the rails have carried (``LinkHandle.tally``)."""
        return plain_rails(flows, self.rail_names, self.rails)

    def submit(
        self,
        blocks: Blocks,
        tag: int,
        is_read: bool,
        unfinished_max: int,
        is_awaited: bool = False,
    ) -> TransferHandle | int | None:
        """Begins a write, or a read; see ``LinkHandle.submit``."""
        return self.handle.submit(
            blocks.array, blocks.total_nbytes, tag, is_read, unfinished_max, is_awaited
        )

    def close(self) -> None:
        """Drops the connections; returns at once, idempotent."""
        self.handle.die(Reason.PEER_CLOSED)


def plain_rails(
    flows: list[tuple[int, int]], names: tuple[str, ...], rails: int
) -> tuple[RailStats, ...]:
    """Rails of a link that ends with the first rail that is lost; ``rails``: how many work."""
    return tuple(
        RailStats(names[i] if i < len(names) else "", "up", flow)
        for i, flow in enumerate(flows_of(flows, rails))
    )


# -- the destination's side


@dataclass(eq=False)
class IncomingLink:
    """A link that another engine opened. Any thread may call anything."""

    handle: LinkHandle
    key: LinkKey
    transport: Transport
    #: Where the peer is, for the log.
    where: str
    #: The session key, which every connection but the first proves. It and ``source`` are set when
    #: a connection is welcomed.
    session: Key | None = field(default=None, kw_only=True)
    #: The source of its last connection, as ``Listener.describe`` says.
    source: str = field(default="", kw_only=True)
    #: As ``OutgoingLink.encrypted_by``.
    encrypted_by: str = field(default="", kw_only=True)


@dataclass(frozen=True)
class Call:
    """A hello that names the transport."""

    key: LinkKey
    #: Untrusted bytes from the peer, which the transport's other half should have made.
    body: bytes
    sock: socket.socket
    where: str
    #: The hello's proof.
    proof: bytes
    #: The descriptor that came with the hello, if any. It is closed unless the connection becomes a
    #: rail.
    fds: list[int] = field(default_factory=list)


class Join(ABC):
    """What the transport does with a connection that is to carry frames of a link."""

    #: Whether ``check`` may block: then it is called on another thread.
    may_block: ClassVar[bool] = False

    @abstractmethod
    def check(self) -> bytes:
        """The body of the welcome; ``TransportRefused``, ``OSError``."""

    @abstractmethod
    def begin(self) -> IncomingLink:
        """A new link, for the first connection of one."""

    @abstractmethod
    def add(self, link: IncomingLink) -> bool:
        """Gives the welcomed connection to the plane, with its descriptor; False when the link has
        ended, ``OSError``: then nothing was taken."""

    def close(self) -> None:
        """Gives back what the link did not get; also while ``check`` is under way."""


@dataclass(frozen=True)
class PlainJoin(Join):
    """For a transport that accepts every connection: nothing of it has to be looked at."""

    transport: Transport
    call: Call
    #: Makes the link's incoming end.
    make: Callable[[], LinkHandle]
    #: Gives the descriptor of a connection to a link, whose session key is set; see ``Join.add``.
    give: Callable[[IncomingLink, int], bool]
    #: The body of the welcome.
    body: bytes = b""

    def check(self) -> bytes:
        return self.body

    def begin(self) -> IncomingLink:
        return IncomingLink(self.make(), self.call.key, self.transport, self.call.where)

    def add(self, link: IncomingLink) -> bool:
        return self.give(link, self.call.sock.fileno())


@dataclass(frozen=True)
class Answer:
    """The hello has been done; the connection ends with this welcome."""

    what: str
    body: bytes = b""


@dataclass(frozen=True)
class Work:
    """As ``Answer``, once ``run``, which may block, has returned the body on another thread. It
    raises ``TransportRefused`` or ``OSError``."""

    what: str
    run: Callable[[], bytes]


Accepted: TypeAlias = Join | Answer | Work


# -- the transport


class Transport(ABC):
    """One way to other engines, of one engine. Any thread may call anything, but ``start`` once."""

    #: In ``Config.transports``, on cards and in greetings.
    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    #: Whether its greetings come by listeners of its own, and by no other; else over TCP.
    has_listener: ClassVar[bool] = False
    #: The devices that memory has to be registered with, if the transport has any.
    fabric: Fabric | None = None

    _local: Local

    def __init__(self, config: Config) -> None:
        """``te.TopologyError`` for a configuration that names what is not there. What is missing
        otherwise is for ``probe`` to tell."""

    def probe(self) -> str | None:
        """Why this engine cannot use it; None if it can. Costs nothing."""
        return None

    def start(self, local: Local, watch: Watch) -> tuple[Listener, ...]:
        """Begins, before the first peer; the listeners of its own, if it has any. Without any, its
        greetings come by the engine's own listener."""
        self._local = local
        return ()

    def offer(self) -> bytes | None:
        """What peers have to know, for the card, beside the engine's address; None if it is not to
        be offered."""
        return b""

    @abstractmethod
    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """A link with its rails to the engine of the card, which offers this; blocks until
        ``deadline_s`` of the monotonic clock at most, ``timeout_s`` from now.

        ``TransportRefused`` when another transport may do it, ``te.ConnectError`` when none would,
        ``te.VersionError``, ``te.HandshakeError``.
        """

    @abstractmethod
    def accept(self, call: Call, link: IncomingLink | None) -> Accepted:
        """What is to be done for a hello. ``link``: the open one that it is about, whose session
        key it has proved; None of a new link. On the accepting thread: it must not block.
        ``TransportRefused`` has the reason for the peer, ``te.HandshakeError`` and
        ``te.errors.ProtocolViolation`` are for a body that no engine makes."""

    def share(self, region: Region, timeout_s: float) -> None:
        """Memory was registered: peers may learn of it."""

    def unshare(self, region: Region, timeout_s: float) -> None:
        """Memory is registered no more; after it returns no peer reaches it by itself."""

    @property
    def rail_changes(self) -> tuple[int, int]:
        """Rails that were up and were lost while their link stayed, and rails that came back."""
        return 0, 0

    def on_event(self, number: int) -> None:
        """Something has become of a link, which need not be the transport's: it has ended, or its
        rails have changed. On the accepting thread: it must not block."""

    def close(self, timeout_s: float) -> None:
        """Ends its threads."""
