# SPDX-License-Identifier: Apache-2.0
"""An outgoing link over RDMA, and its rails as they are now."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from te.stats import RailFlow, RailStats
from te.transports.base import OutgoingLink
from te.transports.rdma._core import RdmaLink
from te.transports.rdma.direct import Greet, Path
from te.transports.rdma.messages import CardNic
from te.transports.rdma.rails import Rail, State

__all__ = ["Kept", "KeptLink"]


@dataclass
class Kept:
    """One rail: what is known of it and the ways it can take."""

    rail: Rail
    ways: list[Path]
    way: int = 0
    #: Whether this way has ever worked.
    has_worked: bool = False
    tries: int = 0
    #: Attempts that have not ended, also those that are too late.
    attempts: int = 0


@dataclass(eq=False)
class KeptLink(OutgoingLink):
    """An outgoing link over RDMA. Any thread may read it."""

    handle: RdmaLink
    #: The id of the engine at its other end, for the log, and that engine's devices.
    engine_id: str
    nics: list[CardNic]
    greet: Greet
    kept: list[Kept] = field(default_factory=list)
    #: Notified whenever a rail has come up or gone down, or the link has ended.
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def rails(self) -> int:
        """Those that are up."""
        return self.states().count(State.UP)

    @property
    def bytes_per_s(self) -> float:
        """The sum of the devices by which rails are up."""
        up = [kept.ways[kept.way].nic for kept in self.kept if kept.rail.state is State.UP]
        return sum({nic.name: nic.bytes_per_s for nic in up}.values())

    @property
    def rail_names(self) -> tuple[str, ...]:
        """The two devices of each rail."""
        return tuple(str(kept.ways[kept.way]) for kept in self.kept)

    def rail_stats(self, flows: list[tuple[int, int]]) -> tuple[RailStats, ...]:
        """See ``OutgoingLink.rail_stats``."""
        return tuple(
            RailStats(
                name,
                kept.rail.state.value,
                RailFlow(*flow),
                bytes_in_flight,
                bytes_per_s,
                kept.rail.reason,
            )
            for name, kept, flow, (_, bytes_in_flight, bytes_per_s) in zip(
                self.rail_names, self.kept, flows, self.handle.rail_flows(), strict=False
            )
        )

    def states(self) -> list[State]:
        """Of every rail."""
        return [kept.rail.state for kept in self.kept]

    def notify(self) -> None:
        """Has ``await_rails`` look again."""
        with self.changed:
            self.changed.notify_all()

    def await_rails(self, deadline_s: float) -> str | None:
        """Waits until each rail is up or was tried once in every way, or the link has ended; why
        none is up, or None."""
        with self.changed:
            while self.handle.alive and not all(
                kept.rail.state is State.UP or kept.tries >= len(kept.ways) for kept in self.kept
            ):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    break
        if not self.handle.alive:
            return "the link has ended"
        if State.UP in self.states():
            return None
        return "; ".join(
            f"rail {i} by {kept.ways[kept.way]}: {kept.rail.reason or 'no answer in time'}"
            for i, kept in enumerate(self.kept)
        )
