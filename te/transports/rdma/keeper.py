# SPDX-License-Identifier: Apache-2.0
"""Keeps the rails of outgoing links over RDMA alive: a thread around ``te.transports.rdma.rails``.

The plane finds out that a rail died and moves its work elsewhere by itself; this makes it anew.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from te.errors import Error
from te.transports.base import Local
from te.transports.rdma.direct import BUILD_TIMEOUT_S, Path, build_rail
from te.transports.rdma.link import Kept, KeptLink
from te.transports.rdma.rails import Event, Rail, State, Timing
from te.transports.rdma.reasons import RailReason, rail_sentence
from te.transports.rdma.striping import nominal

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

# Of one rail at a time: siw dials inside the kernel, which goes on after our deadline until TCP
# hears something, or the neighbour is known to be gone; by then, after 10 s, four have begun.
ATTEMPTS_MAX = 5
PROBE_TIMEOUT_S = 2.0

_EVENTS: Final[dict[int, Event]] = {
    RailReason.RAIL_UP: Event.ANSWERED,
    RailReason.RAIL_SUSPECT: Event.QUIET,
    RailReason.RAIL_MOVED: Event.MOVED,
}
# All that a rail which carries something tells; of several the plane keeps the last.
_ALIVE: Final = frozenset(_EVENTS.values())


class Keeper:
    """The thread that makes rails. It starts with the first link."""

    def __init__(self, name: str) -> None:
        self._name = name
        # A SimpleQueue waits for ever when a short time-out is over before it has begun to wait
        # (CPython 3.11: the time that is left is negative then).
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._links: dict[int, KeptLink] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopping = False
        #: Rails that went down, and rails that came back; written by the thread.
        self.lost = 0
        self.remade = 0

    def add(self, local: Local, link: KeptLink, ways: list[list[Path]]) -> None:
        """Begins to make a link's rails. Any thread."""
        now_s = time.monotonic()
        timing = Timing(
            rebuild_timeout_s=BUILD_TIMEOUT_S + 0.5,
            probe_timeout_s=min(local.config.rail_timeout_s, PROBE_TIMEOUT_S) + 0.5,
            backoff_s=min(Timing.backoff_s, local.config.rail_backoff_max_s),
            backoff_max_s=local.config.rail_backoff_max_s,
        )
        link.kept = [
            Kept(Rail(hash((local.id, link.handle.number, i)), now_s, timing, State.DOWN), one)
            for i, one in enumerate(ways)
        ]
        nics = [one[0].nic for one in ways]
        rates = nominal([nic.bytes_per_s for nic in nics])
        link.handle.plan_rails([(nic.index, rate) for nic, rate in zip(nics, rates, strict=True)])
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=[local], name=self._name, daemon=True
                )
                self._thread.start()
        self._calls.put(lambda: self._links.update({link.handle.number: link}))

    def on_event(self, number: int, rail: int, epoch: int, code: int, errnum: int) -> None:
        """What the plane tells of a link (rail -1: it has died) or a rail. Any thread."""
        self._call(lambda: self._heard(number, rail, epoch, code, errnum))

    def on_link_up(self, nic: int) -> None:
        """A device's port has its link again, or another address. Any thread."""
        self._call(lambda: self._link_up(nic))

    def _call(self, function: Callable[[], None]) -> None:
        if self._thread is not None:  # Else there is no link of ours, and nobody to take it.
            self._calls.put(function)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; rails under construction come to nothing."""
        self._stopping = True
        self._calls.put(lambda: None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- the thread

    def _run(self, local: Local) -> None:
        self._timeout_s = local.config.rail_timeout_s
        while not self._stopping:
            now_s = time.monotonic()
            for number, link in tuple(self._links.items()):
                if not link.handle.alive:
                    # It may have died before it was added: nobody tells of that again.
                    del self._links[number]
                    link.notify()
                    continue
                for i, kept in enumerate(link.kept):
                    before = kept.rail.state
                    if kept.rail.tick(now_s):
                        self._noted(link, i, before)
                        if kept.rail.state is State.REBUILD:
                            self._begin(local, link, i)
            due_s = min(
                (kept.rail.due_s for one in self._links.values() for kept in one.kept),
                default=now_s + 3600,
            )
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=min(max(due_s - time.monotonic(), 0.0), 3600.0))()

    def _heard(self, number: int, rail: int, epoch: int, code: int, errnum: int) -> None:
        link = self._links.get(number)
        if link is None:
            return
        if rail < 0:
            return  # Woken up by this, the thread sees that the link is not alive.
        event = _EVENTS.get(code, Event.BROKEN)
        if event in _ALIVE:  # The plane can be faster than the thread that made the rail.
            self._handle(link, rail, Event.BUILT, epoch)
            self._handle(link, rail, Event.ANSWERED, epoch)
        reason = rail_sentence(code, errnum, self._timeout_s) if event is Event.BROKEN else ""
        self._handle(link, rail, event, epoch, reason)

    def _link_up(self, nic: int) -> None:
        for link in self._links.values():
            for kept in link.kept:
                if kept.ways[kept.way].nic.index == nic:
                    kept.rail.handle(Event.LINK_UP, time.monotonic())

    def _handle(
        self, link: KeptLink, index: int, event: Event, epoch: int, reason: str = ""
    ) -> None:
        kept = link.kept[index]
        before = kept.rail.state
        if kept.rail.handle(event, time.monotonic(), epoch, reason):
            self._noted(link, index, before)

    def _noted(self, link: KeptLink, index: int, before: State) -> None:
        """After a rail's state has changed."""
        kept = link.kept[index]
        if kept.rail.state is State.SUSPECT:
            logger.info(
                "rail %d to %s makes no progress: the other rails take over its work",
                index,
                link.engine_id,
            )
        elif before is State.SUSPECT and kept.rail.state is State.UP:
            logger.info("rail %d to %s makes progress again", index, link.engine_id)
        elif kept.rail.state is State.UP:
            logger.info("rail %d to %s is up: %s", index, link.engine_id, kept.ways[kept.way])
            self.remade += kept.has_worked
            kept.has_worked = True
        elif kept.rail.state is State.DOWN:
            carried = before in (State.UP, State.SUSPECT)
            self.lost += carried
            logger.log(
                logging.WARNING if carried or not kept.tries else logging.INFO,
                "rail %d to %s by %s is down: %s",
                index, link.engine_id, kept.ways[kept.way], kept.rail.reason,
            )  # fmt: skip
            kept.tries += 1
            if not kept.has_worked:
                kept.way = (kept.way + 1) % len(kept.ways)
        link.notify()

    def _begin(self, local: Local, link: KeptLink, index: int) -> None:
        kept = link.kept[index]
        epoch, path = kept.rail.generation, kept.ways[kept.way]
        if kept.attempts == ATTEMPTS_MAX:
            why = f"{kept.attempts} attempts to make the rail are still blocked in the device"
            self._handle(link, index, Event.REFUSED, epoch, why)
        elif local.run(lambda: self._build(local, link, index, epoch, path)):
            kept.attempts += 1

    def _build(self, local: Local, link: KeptLink, index: int, epoch: int, path: Path) -> None:
        reason, rail = "", link.kept[index].rail
        try:
            if (rail.generation, rail.state) != (epoch, State.REBUILD):
                raise TimeoutError(None, "its deadline passed before a thread was free")
            remote = link.nics[path.remote]
            build_rail(local, link.handle, remote, index, epoch, path, link.greet)
        except (OSError, Error) as exc:
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        self._calls.put(lambda: self._built(link, index, epoch, reason))

    def _built(self, link: KeptLink, index: int, epoch: int, reason: str) -> None:
        link.kept[index].attempts -= 1
        event = Event.REFUSED if reason else Event.BUILT
        self._handle(link, index, event, epoch, reason)
