# SPDX-License-Identifier: Apache-2.0
"""The life of a rail that can die and come back: a table; events in, instructions out.

    UP ──quiet──▶ SUSPECT ──stuck, broken──▶ DOWN ──back-off over──▶ REBUILD ──▶ PROBE ──▶ UP
     ◀──moves again──┘                        ▲ ◀── refused, broken, no answer ──┴──┘

Pure: the caller brings the time and does what it is told. Its own deadlines decide, not the
device's: a device may retry for ever without a completion. A rail that failed always gets a new
queue pair, since one that was in the error state has lost its place in the stream.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["TRANSITIONS", "Event", "Instruction", "Rail", "State", "Timing", "usable"]


class State(enum.Enum):
    """How a rail is."""

    #: Takes work.
    UP = "up"
    #: Has work that does not move; takes more only when no rail is UP.
    SUSPECT = "suspect"
    #: Waits for its back-off to be over.
    DOWN = "down"
    #: Gets a new queue pair on both sides.
    REBUILD = "rebuild"
    #: Has one, and must carry a small write before it carries anything else.
    PROBE = "probe"


class Event(enum.Enum):
    """What happened to a rail."""

    #: Something completed that it was given.
    MOVED = "moved"
    #: A completion with an error, an event of the device, or word from the peer: it is broken.
    BROKEN = "broken"
    #: The port has its link again.
    LINK_UP = "link up"
    #: Both sides have the new queue pair.
    BUILT = "built"
    #: They do not, and will not by themselves.
    REFUSED = "refused"
    #: The probe arrived.
    ANSWERED = "answered"
    #: Nothing moved for ``suspect_after_s``. (``Rail.tick`` finds this one and the next two.)
    QUIET = "quiet"
    #: Nothing moved for ``down_after_s``, or a rebuild or a probe took too long.
    STUCK = "stuck"
    #: The back-off is over.
    DUE = "due"


class Instruction(enum.Enum):
    """What the caller has to do, in the order given."""

    #: Give it no new work while another rail is UP.
    HOLD = "hold"
    #: Give it work.
    USE = "use"
    #: Move its queue pair to the error state and reap what it had.
    BREAK = "break"
    #: Write what it had not finished again, on the rails that are left.
    REPLAN = "replan"
    #: Make a new queue pair here and at the peer; tell BUILT or REFUSED.
    BUILD = "build"
    #: Write a few bytes over it; tell ANSWERED, or BROKEN.
    PROBE = "probe"


_FAILED = (Instruction.HOLD, Instruction.BREAK, Instruction.REPLAN)

TRANSITIONS: Final[dict[tuple[State, Event], tuple[State, tuple[Instruction, ...]]]] = {
    (State.UP, Event.QUIET): (State.SUSPECT, (Instruction.HOLD,)),
    (State.UP, Event.STUCK): (State.DOWN, _FAILED),
    (State.UP, Event.BROKEN): (State.DOWN, _FAILED),
    (State.SUSPECT, Event.MOVED): (State.UP, (Instruction.USE,)),
    (State.SUSPECT, Event.STUCK): (State.DOWN, _FAILED),
    (State.SUSPECT, Event.BROKEN): (State.DOWN, _FAILED),
    (State.DOWN, Event.DUE): (State.REBUILD, (Instruction.BUILD,)),
    (State.REBUILD, Event.BUILT): (State.PROBE, (Instruction.PROBE,)),
    (State.REBUILD, Event.REFUSED): (State.DOWN, (Instruction.BREAK,)),
    (State.REBUILD, Event.BROKEN): (State.DOWN, (Instruction.BREAK,)),
    (State.REBUILD, Event.STUCK): (State.DOWN, (Instruction.BREAK,)),
    (State.PROBE, Event.ANSWERED): (State.UP, (Instruction.USE,)),
    (State.PROBE, Event.BROKEN): (State.DOWN, (Instruction.BREAK,)),
    (State.PROBE, Event.STUCK): (State.DOWN, (Instruction.BREAK,)),
}
"""What is not in here changes nothing: late news of a queue pair that is gone already."""


@dataclass(frozen=True)
class Timing:
    """Deadlines and back-off, in seconds.

    Raises ``ValueError`` for one that is not positive, or when being suspect comes after being
    down.
    """

    #: A rail with work and no completion for so long is SUSPECT, for longer still DOWN. Longer
    #: than the device's own retries, which tell the reason (timeout 14, retry 3: 0.3 s on rxe).
    suspect_after_s: float = 0.1
    down_after_s: float = 1.0
    #: Both sides must have the new queue pair, and the probe must be there, in this time each.
    rebuild_timeout_s: float = 1.0
    probe_timeout_s: float = 1.0
    #: From a failure to the rebuild: this long at first, twice as long with each failure more,
    #: never longer than the maximum. Shortened by up to a half, at random: the rails of many peers
    #: that fail together shall not come back together. The maximum counts when a link returns in
    #: the middle of an attempt: that one fails after 2.5 s, this passes, the next one succeeds.
    backoff_s: float = 0.05
    backoff_max_s: float = 1.0
    #: A rail that was UP for so long has its former failures forgiven.
    steady_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a positive number of seconds")
        for less, more in (("suspect_after_s", "down_after_s"), ("backoff_s", "backoff_max_s")):
            if getattr(self, less) > getattr(self, more):
                raise ValueError(
                    f"{less}={getattr(self, less)} must not be above {more}={getattr(self, more)}"
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
        """When ``tick`` has something to do by itself; while there is work to watch, it is called
        at least every ``suspect_after_s``."""
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
    ) -> tuple[Instruction, ...]:
        """Takes an event of the queue pair ``generation`` (None: of whatever there is now).

        News of a former queue pair is ignored.
        """
        if generation is not None and generation != self._generation:
            return ()
        if event is Event.LINK_UP:
            self._hurry(now_s)
            return ()
        step = TRANSITIONS.get((self._state, event))
        if step is None:
            return ()
        before, (self._state, instructions) = self._state, step
        if self._state is State.DOWN:
            self._fail(before, now_s, reason or event.value)
        if self._state is State.REBUILD:
            self._generation += 1
        self._since_s = now_s
        return instructions

    def tick(
        self, now_s: float, waiting_since_s: float | None = None, backlog_s: float = 0.0
    ) -> tuple[Instruction, ...]:
        """Looks at the clock.

        ``waiting_since_s``: since when nothing has completed although there is work, None without
        work. ``backlog_s``: how long the work given to the rail takes at its measured rate; a slow
        rail may be silent for longer.
        """
        if self._state in (State.UP, State.SUSPECT):
            event = self._silence(now_s, waiting_since_s, backlog_s)
        elif now_s >= self.due_s:
            event = Event.DUE if self._state is State.DOWN else Event.STUCK
        else:
            return ()
        if event is None:
            return ()
        waited = 0.0 if waiting_since_s is None else now_s - waiting_since_s
        return self.handle(event, now_s, reason=self._late(event, waited))

    def _silence(
        self, now_s: float, waiting_since_s: float | None, backlog_s: float
    ) -> Event | None:
        if waiting_since_s is None:
            return Event.MOVED  # all of it has completed
        silent_s = now_s - waiting_since_s - backlog_s
        if silent_s >= self._timing.down_after_s:
            return Event.STUCK
        if silent_s >= self._timing.suspect_after_s:
            return Event.QUIET
        return Event.MOVED

    def _late(self, event: Event, waited_s: float) -> str:
        if event is not Event.STUCK:
            return ""
        match self._state:
            case State.REBUILD:
                return f"no new queue pair within {self._timing.rebuild_timeout_s:g} s"
            case State.PROBE:
                return f"the probe did not arrive within {self._timing.probe_timeout_s:g} s"
        return f"no completion for {waited_s:.2f} s"

    def _fail(self, before: State, now_s: float, reason: str) -> None:
        if before is State.UP and now_s - self._since_s >= self._timing.steady_s:
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


def usable(states: Iterable[State]) -> tuple[int, ...]:
    """Indices of the rails that new work goes to: those that are UP, else those that are SUSPECT,
    else none."""
    table = list(states)
    for wanted in (State.UP, State.SUSPECT):
        found = tuple(i for i, state in enumerate(table) if state is wanted)
        if found:
            return found
    return ()
