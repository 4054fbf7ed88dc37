# SPDX-License-Identifier: Apache-2.0
"""An outgoing link over RDMA: its rails as they are now, and what each of them gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from te.blocks import Blocks
from te.core.handles import TransferHandle
from te.core.wire import RAILS_LIMIT
from te.transports.base import OutgoingLink, RailView
from te.transports.rdma._core import RdmaLink
from te.transports.rdma.direct import Greet, Path
from te.transports.rdma.messages import CardNic
from te.transports.rdma.meter import Meter
from te.transports.rdma.pieces import cut
from te.transports.rdma.rails import Rail, State, usable
from te.transports.rdma.striping import Lane, levelled, patience, reachable, shares, stripe

__all__ = ["Kept", "KeptLink", "divide"]


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
    #: Of the engine at its other end, for the log; and its devices.
    engine_id: str
    nics: list[CardNic]
    #: By local device, how far it is from the memory at an address.
    distances: Callable[[int], tuple[int | None, ...]]
    greet: Greet
    kept: list[Kept] = field(default_factory=list)
    #: Set whenever a rail has come up or gone down.
    changed: threading.Condition = field(default_factory=threading.Condition)
    turn: int = 0
    #: By rail, which local device it leaves by, and how fast they are.
    local_nics: list[int] = field(default_factory=list)
    meter: Meter = field(default_factory=lambda: Meter([]))

    @property
    def rails(self) -> int:
        """Those that are up."""
        return self.states().count(State.UP)

    @property
    def views(self) -> tuple[RailView, ...]:
        """Every rail."""
        flows = self.handle.rail_flows(len(self.kept))
        rates = self.meter.rates(flows)
        return tuple(
            RailView(
                kept.ways[kept.way].nic.name,
                kept.rail.state,
                *flows[i][:2],
                rates[i],
                kept.rail.reason,
            )
            for i, kept in enumerate(self.kept)
        )

    def states(self) -> list[State]:
        """Of every rail."""
        return [kept.rail.state for kept in self.kept]

    def await_rails(self, deadline_s: float) -> str | None:
        """Waits until each rail is up or was tried once in every way; why none is up, or None."""
        with self.changed:
            while not all(
                kept.rail.state is State.UP or kept.tries >= len(kept.ways) for kept in self.kept
            ):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    break
        if State.UP in self.states():
            return None
        return "; ".join(
            f"rail {i} by {kept.ways[kept.way]}: {kept.rail.reason or 'no answer in time'}"
            for i, kept in enumerate(self.kept)
        )

    def submit(
        self, blocks: Blocks, tag: int, is_read: bool, unfinished_max: int
    ) -> TransferHandle | int | None:
        """See ``OutgoingLink.submit``; divides the blocks over the rails."""
        array, plan = blocks.array, b""
        if len(array):
            # Of all that it touches, the first region counts: a pool lies on one node or GPU.
            address = int(array["dst" if is_read else "src"][0])
            pieces, least = divide(self, blocks, self.distances(address))
            plan = least.ljust(RAILS_LIMIT, b"\0") + pieces
        return self.handle.submit(array, blocks.total_nbytes, tag, is_read, unfinished_max, plan)


def divide(link: KeptLink, blocks: Blocks, distances: Sequence[int | None]) -> tuple[bytes, bytes]:
    """The pieces of the blocks for the rails, as ``cut`` gives them; and by rail how many another
    must have waiting before it helps that one.

    ``distances`` are those of the local devices from the memory. Without a rail that works all of
    them get a part, and whichever is back first takes it. There is at least one block.
    """
    by_rail = tuple(distances[nic] for nic in link.local_nics)
    rails, ways = reachable(usable(link.states()) or range(len(by_rail)), by_rail)
    flows = link.handle.rail_flows(len(by_rail))
    rates = link.meter.rates(flows)
    level = levelled([rates[i] for i in rails])
    lanes = [Lane(level[k], flows[i][1], ways[k]) for k, i in enumerate(rails)]
    weights = [0.0] * len(by_rail)
    link.turn += 1
    for i, share in zip(rails, shares(lanes, blocks.total_nbytes, link.turn), strict=True):
        weights[i] = share
    speeds = [max(level)] * len(by_rail)  # of a rail that is not usable now: as if it were well
    for i, rate in zip(rails, level, strict=True):
        speeds[i] = rate
    return cut(blocks, stripe(blocks, weights)), patience(by_rail, speeds)
