# SPDX-License-Identifier: Apache-2.0
"""The life of a rail that can die and come back, as a table.

    UP ──quiet──▶ SUSPECT ──broken──▶ DOWN ──back-off over──▶ REBUILD ──▶ PROBE ──▶ UP
     ◀──moves again──┘   └──────────▶  ▲ ◀── refused, broken, no answer ──┴──┘

Who finds what: the data plane, which sees every completion, tells that a rail is quiet, moves again
or is broken, and has moved its work elsewhere by then (``qps.pyx``). Devices tell that a link is
back. The times between attempts, and those that attempts may take, are kept here.

Pure: the caller brings the time. A rail that failed always gets a new queue pair, since one that
was in the error state has lost its place in the stream.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass
from typing import Final

from te.transports.base import RailState as State

__all__ = ["TRANSITIONS", "Event", "Rail", "State", "Timing"]


class Event(enum.Enum):
    """What happened to a rail."""

    #: Nothing that it was given completed for a while.
    QUIET = "quiet"
    #: Something did.
    MOVED = "moved"
    #: Nothing completed for too long; or a completion with an error, an event of the device, or
    #: word from the peer: its queue pair is gone.
    BROKEN = "broken"
    #: The port has its link again, or another address.
    LINK_UP = "link up"
    #: Both sides have the new queue pair.
    BUILT = "built"
    #: They do not, and will not by themselves.
    REFUSED = "refused"
    #: The probe arrived.
    ANSWERED = "answered"
    #: A rebuild or a probe took too long. (``Rail.tick`` finds this one and the next.)
    STUCK = "stuck"
    #: The back-off is over.
    DUE = "due"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.UP, Event.QUIET): State.SUSPECT,
    (State.UP, Event.BROKEN): State.DOWN,
    (State.SUSPECT, Event.MOVED): State.UP,
    (State.SUSPECT, Event.BROKEN): State.DOWN,
    (State.DOWN, Event.DUE): State.REBUILD,
    (State.REBUILD, Event.BUILT): State.PROBE,
    (State.REBUILD, Event.REFUSED): State.DOWN,
    (State.REBUILD, Event.BROKEN): State.DOWN,
    (State.REBUILD, Event.STUCK): State.DOWN,
    (State.PROBE, Event.ANSWERED): State.UP,
    (State.PROBE, Event.BROKEN): State.DOWN,
    (State.PROBE, Event.STUCK): State.DOWN,
}
"""What is not in here changes nothing: late news of a queue pair that is gone already."""


@dataclass(frozen=True)
class Timing:
    """Deadlines and back-off, in seconds.

    Raises ``ValueError`` for one that is not positive, or a maximum below its minimum.
    """

    #: Both sides must have the new queue pair, and the probe must be there, in this time each.
    rebuild_timeout_s: float = 1.0
    probe_timeout_s: float = 1.0
    #: From a failure to the rebuild: this long at first, twice as long with each failure more,
    #: never longer than the maximum. Shortened by up to a half, at random: the rails of many peers
    #: that fail together shall not come back together. The maximum counts where nobody tells that a
    #: link is back (a switch in between): an attempt fails, this passes, the next one succeeds.
    backoff_s: float = 0.05
    backoff_max_s: float = 1.0
    #: A rail that carried for so long has its former failures forgiven.
    steady_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number of seconds")
        if self.backoff_s > self.backoff_max_s:
            raise ValueError(
                f"backoff_s={self.backoff_s} must not be above backoff_max_s={self.backoff_max_s}"
            )


class Rail:
    """One rail of a peer. Times are seconds of one clock that never goes back."""

    def __init__(
        self, seed: int, now_s: float, timing: Timing | None = None, state: State = State.UP
    ) -> None:
        """``seed`` makes its jitter; give each rail of each peer another one."""
        self._timing = Timing() if timing is None else timing
        self._random = random.Random(seed)
        self._state = state
        self._since_s = now_s
        self._up_since_s = now_s
        self._due_s = now_s
        self._failures = 0
        self._generation = 0
        self._reason = ""

    def __repr__(self) -> str:
        why = f", {self._reason}" if self._reason else ""
        return f"Rail({self._state.value}, generation {self._generation}{why})"

    @property
    def state(self) -> State:
        return self._state

    @property
    def since_s(self) -> float:
        """When it came into this state."""
        return self._since_s

    @property
    def generation(self) -> int:
        """Number of its queue pair: one more with each rebuild that begins."""
        return self._generation

    @property
    def failures(self) -> int:
        """Times it went DOWN since it was last steady."""
        return self._failures

    @property
    def reason(self) -> str:
        """Why it last went DOWN; empty if it never did."""
        return self._reason

    @property
    def due_s(self) -> float:
        """When ``tick`` has something to do."""
        match self._state:
            case State.DOWN:
                return self._due_s
            case State.REBUILD:
                return self._since_s + self._timing.rebuild_timeout_s
            case State.PROBE:
                return self._since_s + self._timing.probe_timeout_s
        return math.inf

    def handle(
        self, event: Event, now_s: float, generation: int | None = None, reason: str = ""
    ) -> bool:
        """Takes an event of the queue pair ``generation`` (None: of whatever there is now); whether
        the state changed.

        News of a former queue pair is ignored.
        """
        if generation is not None and generation != self._generation:
            return False
        if event is Event.LINK_UP:
            self._hurry(now_s)
            return False
        after = TRANSITIONS.get((self._state, event))
        if after is None:
            return False
        before, self._state = self._state, after
        if after is State.DOWN:
            self._fail(before, now_s, reason or event.value)
        if after is State.REBUILD:
            self._generation += 1
        if event is Event.ANSWERED:
            self._up_since_s = now_s
        self._since_s = now_s
        return True

    def tick(self, now_s: float) -> bool:
        """Looks at the clock; whether the state changed. One that is REBUILD by it is to be built
        now."""
        if now_s < self.due_s:
            return False
        match self._state:
            case State.DOWN:
                return self.handle(Event.DUE, now_s)
            case State.REBUILD:
                late = f"no new queue pair within {self._timing.rebuild_timeout_s:g} s"
            case _:
                late = f"the probe did not arrive within {self._timing.probe_timeout_s:g} s"
        return self.handle(Event.STUCK, now_s, reason=late)

    def _fail(self, before: State, now_s: float, reason: str) -> None:
        was_up = before in (State.UP, State.SUSPECT)
        if was_up and now_s - self._up_since_s >= self._timing.steady_s:
            self._failures = 0
        self._failures += 1
        self._reason = reason
        exponent = min(self._failures - 1, 30)
        delay_s = min(self._timing.backoff_s * 2.0**exponent, self._timing.backoff_max_s)
        self._due_s = now_s + delay_s * self._random.uniform(0.5, 1.0)

    def _hurry(self, now_s: float) -> None:
        """What it waited for has probably come."""
        if self._state is State.DOWN:
            soon_s = now_s + self._timing.backoff_s * self._random.uniform(0.5, 1.0)
            self._due_s = min(self._due_s, soon_s)
            self._failures = 1
