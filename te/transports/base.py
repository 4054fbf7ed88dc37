# SPDX-License-Identifier: Apache-2.0
"""What a transport must do for an engine, with costs and side effects."""

from __future__ import annotations

import abc
from dataclasses import dataclass

from te.arrivals import Arrivals
from te.blocks import Blocks
from te.config import Config
from te.handshake import Card
from te.memory import RegionTable
from te.transfers import Transfer

__all__ = ["Counters", "Local", "Rail", "Transport"]


@dataclass(frozen=True)
class Local:
    """The engine as its transports see it: who it is and what peers may do to it."""

    id: str
    epoch: int
    config: Config
    memory: RegionTable
    arrivals: Arrivals


@dataclass(frozen=True)
class Counters:
    """What a transport has done since it started."""

    #: Payload handed to the network.
    bytes_sent: int
    #: Payload that landed in registered memory.
    bytes_received: int
    #: Connections in use, of both directions.
    rails: int


class Rail(abc.ABC):
    """One path to one peer. Once dead it stays dead; any thread may call anything."""

    @abc.abstractmethod
    def submit(self, transfer: Transfer, blocks: Blocks, tag: int) -> None:
        """Takes over a transfer whose source blocks the caller has checked and holds.

        Costs microseconds, never waits for a peer or for the thread that moves bytes. Raises
        ``te.QueueFull`` and then has taken nothing. On a dead rail the transfer fails at once.
        The transfer is settled exactly once, and only when the rail will not read its source
        again; ``DONE`` only after the destination's acknowledgement.
        """

    @abc.abstractmethod
    def recheck(self) -> None:
        """Looks for transfers whose ``cancel_requested`` was set; costs microseconds."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether it still takes transfers."""

    @abc.abstractmethod
    def close(self, reason: str) -> None:
        """Asks that it die; its transfers fail with the reason. Idempotent, returns at once."""


class Transport(abc.ABC):
    """All rails of one kind of one engine. Constructed running; any thread may call anything.

    It writes memory only after checking, per segment, that every range is registered memory and
    that its tag is open, and only inside a gate that ``quiesce`` can wait for.
    """

    name: str

    @property
    @abc.abstractmethod
    def address(self) -> tuple[str, int]:
        """Numeric host and port for the card."""

    @abc.abstractmethod
    def connect(self, card: Card, timeout_s: float) -> Rail:
        """Blocks until a rail to the card's engine is usable.

        Raises ``te.ConnectError``, ``te.VersionError`` or ``te.HandshakeError``.
        """

    @abc.abstractmethod
    def quiesce(self, timeout_s: float) -> None:
        """Returns when each landing under way at the moment of the call has ended.

        What was revoked before the call (a region, a tag) is then safe from this transport.
        Raises ``te.FenceTimeout``.
        """

    @abc.abstractmethod
    def drop_incoming(self, engine_id: str, timeout_s: float) -> int:
        """Closes that engine's rails into this one and returns how many there were.

        After it returns nothing that was sent on them can land. Raises ``te.FenceTimeout``.
        """

    @abc.abstractmethod
    def counters(self) -> Counters:
        """What was done so far; a consistent picture is not promised."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> None:
        """Stops landing, fails what is unfinished, ends the threads. Idempotent."""
