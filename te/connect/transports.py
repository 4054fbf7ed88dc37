# SPDX-License-Identifier: Apache-2.0
"""The transports of one engine, and opening a link by the first of them that works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from te.connect.dial import address_text
from te.errors import ConnectError, DeviceError, TransportMismatch
from te.handshake import Card
from te.memory import Region
from te.memory_kinds import MemoryKind
from te.transports import registry
from te.transports.base import (
    Capabilities,
    Listener,
    Local,
    OutgoingLink,
    Transport,
    TransportRefused,
    Watch,
)
from te.verbs.fabric import Fabric

__all__ = ["EngineTransports", "OpenLink"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenLink:
    """A link with all its rails."""

    link: OutgoingLink
    #: Name of its transport.
    transport: str
    #: Why no preferred transport was taken; empty when the first choice works.
    reason: str


class EngineTransports:
    """The transports that the engine's configuration names, the preferred one first. Any thread may
    call anything, but ``start`` once."""

    def __init__(self, transports: Collection[Transport], encrypt: bool = False) -> None:
        """``encrypt``: ``Config.encrypt``. ``te.DeviceError`` if none of them can be used."""
        private = [one for one in transports if one.capabilities.is_private]
        if encrypt and len(private) < len(transports):
            names = " and ".join(one.name for one in transports if one not in private)
            if not private:
                raise DeviceError(f"{names} cannot encrypt, and Config.encrypt asks for that")
            logger.warning(
                "the engine does not use %s, because it cannot encrypt and Config.encrypt asks "
                "for that",
                names,
            )
            transports = private
        self._all = {one.name: one for one in transports}
        problems = [one.probe() for one in transports]
        if None not in problems:
            raise DeviceError("; ".join(str(problem) for problem in problems))
        self._started: list[Transport] = []
        self._lock = threading.Lock()
        #: Why the engine does not use some of its transports any more, by their names.
        self._left: dict[str, str] = {}
        self._is_known = False

    def __iter__(self) -> Iterator[Transport]:
        return iter(self._all.values())

    def get(self, name: str) -> Transport | None:
        """None for one that the configuration does not name."""
        return self._all.get(name)

    def problem(self, one: Transport) -> str | None:
        """Why it cannot be used; None if it can."""
        return self._left.get(one.name) or one.probe()

    @property
    def usable(self) -> tuple[Transport, ...]:
        """The transports that can be used."""
        return tuple(one for one in self if self.problem(one) is None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that can be used."""
        return tuple(one.name for one in self.usable)

    @property
    def fabric(self) -> Fabric | None:
        """The devices that memory is registered with: at most one transport has any."""
        found = [one.fabric for one in self if one.fabric is not None]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def stages(self) -> bool:
        """Whether memory is staged for any of them."""
        return any(one.capabilities.stages for one in self.usable)

    def refusal(self, kind: MemoryKind, devices: str | None = None) -> str | None:
        """Why memory of the kind cannot be moved, as the end of a sentence; None if it can.

        Transports that cannot move it, beside others that can, are left: the engine goes without
        them from now on. Once a peer may count on them they are not, and it is a refusal.
        ``devices``: why devices did not take the memory; None if they did, or were not asked.
        """

        def is_able(one: Capabilities) -> bool:
            return one.touches in kind.reach or (one.stages and kind.has_copier)

        with self._lock:
            unable = {one.name: "" for one in self.usable if not is_able(one.capabilities)}
            if devices is not None:
                unable |= {one.name: devices for one in self.usable if one.fabric is not None}
            if unable and len(unable) < len(self.usable) and not self._is_known:
                self._left |= {
                    name: f"it cannot move {kind.description}{why and f': {why}'}"
                    for name, why in unable.items()
                }
                logger.warning(
                    "the engine uses %s alone, because some of its memory cannot go by all"
                    " transports; %s",
                    " and ".join(self.names),
                    "; ".join(f"{name}: {self._left[name]}" for name in unable),
                )
                return None
        if not unable:
            return None
        if devices is not None:
            return f"which the devices do not take: {devices}"
        able = tuple(name for name in registry.NAMES if is_able(registry.load(name).capabilities))
        if not able:
            return "which no transport of this build can move"
        return (
            f"which {' or '.join(able).upper()} alone can move; give the engine no other transport:"
            f" Config(transports={able!r})"
        )

    def commit(self) -> None:
        """From now on a peer may count on each that can be used."""
        with self._lock:
            self._is_known = True

    def start(self, local: Local, watch: Watch) -> dict[Transport, tuple[Listener, ...]]:
        """Begins all; the listeners of each."""
        listeners = {}
        for one in self:
            listeners[one] = one.start(local, watch)
            self._started.append(one)
        return listeners

    def offers(self) -> dict[str, bytes]:
        """What each usable transport says on the card, by its name."""
        self.commit()
        found = {one.name: one.offer() for one in self.usable}
        return {name: offer for name, offer in found.items() if offer is not None}

    def open_link(self, card: Card, timeout_s: float) -> OpenLink:
        """Blocks for at most ``timeout_s``; ``te.ConnectError``, ``te.VersionError``,
        ``te.HandshakeError``. ``te.TransportMismatch`` if it would fail again in the same way."""
        deadline_s = time.monotonic() + timeout_s
        if not card.offers.keys() & self._all.keys():
            raise TransportMismatch(
                f"no common transport: the engine {card.id} offers {', '.join(card.offers)},"
                f" this one {', '.join(self._all)}"
            )
        self.commit()
        reasons: list[str] = []
        is_for_good = True
        for name, one in self._all.items():
            problem: str | None = "the other engine does not offer it"
            if name in card.offers:
                problem = self.problem(one)
            if problem is None:
                try:
                    link = one.open(card, card.offers[name], deadline_s, timeout_s)
                except TransportRefused as exc:
                    problem = str(exc)
                    is_for_good &= exc.for_good
                else:
                    return OpenLink(link, name, "; ".join(reasons))
            reasons.append(f"{name}: {problem}")
        kind_of_error = TransportMismatch if is_for_good else ConnectError
        raise kind_of_error(
            f"no transport to the engine {card.id} at {address_text(card.host, card.port)}:"
            f" {'; '.join(reasons)}"
        )

    def share(self, region: Region, timeout_s: float) -> None:
        """Memory was registered."""
        for one in self:
            one.share(region, timeout_s)

    def unshare(self, region: Region, timeout_s: float) -> None:
        """Memory is registered no more; after it returns no peer reaches it."""
        for one in self:
            one.unshare(region, timeout_s)

    def on_event(self, number: int) -> None:
        """Something has become of a link."""
        for one in self:
            one.on_event(number)

    def close(self, timeout_s: float) -> None:
        """Ends the threads of those that have begun."""
        for one in self._started:
            one.close(timeout_s)
