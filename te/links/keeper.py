# SPDX-License-Identifier: Apache-2.0
"""Keeps the rails of outgoing links over RDMA alive: a thread around ``te.rails``.

The plane finds out that a rail died and moves its work elsewhere by itself; this makes it anew.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from te.errors import Error
from te.handshake import Card, RailOffer, Welcome
from te.links.direct import BUILD_TIMEOUT_S, Path, build_rail
from te.links.local import Local
from te.links.meter import Meter
from te.plane._core import LinkHandle
from te.plane.reasons import Reason, rail_sentence
from te.rails import Event, Rail, State, Timing

__all__ = ["BUILDERS", "DirectLink", "Keeper", "RailView"]

logger = logging.getLogger(__name__)

BUILDERS: Final = 48
"""Threads of an engine for what blocks: making rails, and answering those who make them. They begin
when they are needed."""

# Of one rail at a time: siw dials inside the kernel, which goes on after our deadline until TCP
# hears something, or the neighbour is known to be gone; by then, after 10 s, four have begun.
ATTEMPTS_MAX = 5
PROBE_TIMEOUT_S = 2.0

_EVENTS: Final = {
    Reason.RAIL_UP: Event.ANSWERED,
    Reason.RAIL_SUSPECT: Event.QUIET,
    Reason.RAIL_MOVED: Event.MOVED,
}
# All that a rail which carries something tells; of several the plane keeps the last.
_ALIVE: Final = frozenset(_EVENTS.values())


@dataclass(frozen=True)
class RailView:
    """A rail as it is now."""

    #: Name of the local device.
    nic: str
    state: State
    #: Payload that it has carried, and that it has to carry, in bytes.
    done_nbytes: int
    in_flight_nbytes: int
    #: What it is believed to carry: measured, at first the speed of its port.
    bytes_per_s: float
    #: Why it was last given up; empty if it never was.
    reason: str


@dataclass
class _Kept:
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
class DirectLink:
    """An outgoing link over RDMA. Any thread may read it."""

    link: LinkHandle
    card: Card
    #: Makes a connection with this hello's offer and returns the answer.
    greet: Callable[[RailOffer], Welcome]
    rails: list[_Kept] = field(default_factory=list)
    #: Set whenever a rail has come up or gone down.
    changed: threading.Condition = field(default_factory=threading.Condition)
    turn: int = 0
    #: By rail, which local device it leaves by, and how fast they are.
    near: list[int] = field(default_factory=list)
    meter: Meter = field(default_factory=lambda: Meter([]))

    def views(self) -> tuple[RailView, ...]:
        """Every rail."""
        flows = self.link.rail_flows(len(self.rails))
        rates = self.meter.rates(flows)
        return tuple(
            RailView(
                kept.ways[kept.way].near.name,
                kept.rail.state,
                *flows[i][:2],
                rates[i],
                kept.rail.reason,
            )
            for i, kept in enumerate(self.rails)
        )

    def states(self) -> list[State]:
        """Of every rail."""
        return [kept.rail.state for kept in self.rails]

    def await_rails(self, deadline_s: float) -> str | None:
        """Waits until each rail is up or was tried once in every way; why none is up, or None."""
        with self.changed:
            while not all(
                kept.rail.state is State.UP or kept.tries >= len(kept.ways) for kept in self.rails
            ):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.changed.wait(left_s):
                    break
        if State.UP in self.states():
            return None
        return "; ".join(
            f"rail {i} by {kept.ways[kept.way]}: {kept.rail.reason or 'no answer in time'}"
            for i, kept in enumerate(self.rails)
        )


class Keeper:
    """The thread that makes rails. It starts with the first link."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._links: dict[int, DirectLink] = {}
        self._thread: threading.Thread | None = None
        self._builders: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._stopping = False

    def add(self, local: Local, direct: DirectLink, ways: list[list[Path]]) -> None:
        """Begins to make a link's rails. Any thread."""
        now_s = time.monotonic()
        timing = Timing(
            rebuild_timeout_s=BUILD_TIMEOUT_S + 0.5,
            probe_timeout_s=min(local.config.rail_timeout_s, PROBE_TIMEOUT_S) + 0.5,
            backoff_s=min(Timing.backoff_s, local.config.rail_backoff_max_s),
            backoff_max_s=local.config.rail_backoff_max_s,
        )
        direct.rails = [
            _Kept(Rail(hash((local.id, direct.link.number, i)), now_s, timing, State.DOWN), one)
            for i, one in enumerate(ways)
        ]
        direct.near = [one[0].near.index for one in ways]
        direct.meter = Meter([one[0].near.bytes_per_s for one in ways])
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=[local], name=self._name, daemon=True
                )
                self._thread.start()
        self._calls.put(lambda: self._links.update({direct.link.number: direct}))

    def run(self, function: Callable[[], None]) -> bool:
        """Has ``function``, which may block, run on one of a few threads; False once this was
        stopped. Any thread."""
        with self._lock:
            if self._stopping:
                return False
            if self._builders is None:
                self._builders = ThreadPoolExecutor(BUILDERS, f"{self._name}-build")
            self._builders.submit(function)
        return True

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
        with self._lock:
            self._stopping = True
        self._calls.put(lambda: None)
        if self._builders is not None:
            self._builders.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join(timeout_s)

    # -- the thread

    def _run(self, local: Local) -> None:
        self._timeout_s = local.config.rail_timeout_s
        while not self._stopping:
            now_s = time.monotonic()
            for number, direct in tuple(self._links.items()):
                if not direct.link.alive:
                    # It may have died before it was added: nobody tells of that again.
                    del self._links[number]
                    continue
                for i, kept in enumerate(direct.rails):
                    before = kept.rail.state
                    if kept.rail.tick(now_s):
                        self._noted(direct, i, before)
                        if kept.rail.state is State.REBUILD:
                            self._begin(local, direct, i)
            due_s = min(
                (kept.rail.due_s for one in self._links.values() for kept in one.rails),
                default=now_s + 3600,
            )
            with contextlib.suppress(queue.Empty):
                self._calls.get(timeout=min(max(due_s - time.monotonic(), 0.0), 3600.0))()

    def _heard(self, number: int, rail: int, epoch: int, code: int, errnum: int) -> None:
        direct = self._links.get(number)
        if direct is None:
            return
        if rail < 0:
            return  # Woken up by this, the thread sees that the link is not alive.
        event = _EVENTS.get(Reason(code), Event.BROKEN)
        if event in _ALIVE:  # The plane can be faster than the thread that made the rail.
            self._handle(direct, rail, Event.BUILT, epoch)
            self._handle(direct, rail, Event.ANSWERED, epoch)
        reason = rail_sentence(code, errnum, self._timeout_s) if event is Event.BROKEN else ""
        self._handle(direct, rail, event, epoch, reason)

    def _link_up(self, nic: int) -> None:
        for direct in self._links.values():
            for kept in direct.rails:
                if kept.ways[kept.way].near.index == nic:
                    kept.rail.handle(Event.LINK_UP, time.monotonic())

    def _handle(
        self, direct: DirectLink, index: int, event: Event, epoch: int, reason: str = ""
    ) -> None:
        kept = direct.rails[index]
        before = kept.rail.state
        if kept.rail.handle(event, time.monotonic(), epoch, reason):
            self._noted(direct, index, before)

    def _noted(self, direct: DirectLink, index: int, before: State) -> None:
        """After a rail's state has changed."""
        kept = direct.rails[index]
        if kept.rail.state is State.SUSPECT:
            logger.info(
                "rail %d to %s does not move: the others get its work", index, direct.card.id
            )
        elif before is State.SUSPECT and kept.rail.state is State.UP:
            logger.info("rail %d to %s moves again", index, direct.card.id)
        elif kept.rail.state is State.UP:
            logger.info("rail %d to %s is up: %s", index, direct.card.id, kept.ways[kept.way])
            kept.has_worked = True
        elif kept.rail.state is State.DOWN:
            carried = before in (State.UP, State.SUSPECT)
            logger.log(
                logging.WARNING if carried or not kept.tries else logging.INFO,
                "rail %d to %s by %s is down: %s",
                index, direct.card.id, kept.ways[kept.way], kept.rail.reason,
            )  # fmt: skip
            kept.tries += 1
            if not kept.has_worked:
                kept.way = (kept.way + 1) % len(kept.ways)
        with direct.changed:
            direct.changed.notify_all()

    def _begin(self, local: Local, direct: DirectLink, index: int) -> None:
        kept = direct.rails[index]
        epoch, path = kept.rail.generation, kept.ways[kept.way]
        if kept.attempts == ATTEMPTS_MAX:
            why = f"{kept.attempts} attempts still wait in the device"
            self._handle(direct, index, Event.REFUSED, epoch, why)
        elif self.run(lambda: self._build(local, direct, index, epoch, path)):
            kept.attempts += 1

    def _build(self, local: Local, direct: DirectLink, index: int, epoch: int, path: Path) -> None:
        reason, rail = "", direct.rails[index].rail
        try:
            if (rail.generation, rail.state) != (epoch, State.REBUILD):
                raise TimeoutError(None, "its time was over before a thread was free")
            build_rail(local, direct.link, direct.card, index, epoch, path, direct.greet)
        except (OSError, Error) as exc:
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        self._calls.put(lambda: self._built(direct, index, epoch, reason))

    def _built(self, direct: DirectLink, index: int, epoch: int, reason: str) -> None:
        direct.rails[index].attempts -= 1
        event = Event.REFUSED if reason else Event.BUILT
        self._handle(direct, index, event, epoch, reason)
