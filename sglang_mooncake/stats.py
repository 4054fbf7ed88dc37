# SPDX-License-Identifier: Apache-2.0
"""What one rank's hand-over did, counted in memory and, if asked for, kept in one JSON file per
process: for the demo, for tests, and for anyone who asks which transport really carried the bytes.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import te
from sglang_mooncake.context import RankContext
from sglang_mooncake.failures import Failures
from sglang_mooncake.pace import Pace
from sglang_mooncake.refused import RefusedServer
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import WriteStory
from sglang_mooncake.story import RoomStory, Stories, tell

__all__ = ["COMPARED", "STATS_VERSION", "STORY_ROOMS", "Recorder"]

logger = logging.getLogger(__name__)

STATS_VERSION = 1
STORY_ROOMS = 1024
#: What comes of digests that a decode rank is to compare.
COMPARED = ("equal", "different", "not compared")
_SAMPLES_MAX = 10_000
#: Of SGLang's scheduler.
_CALLS = ("send", "poll")
_WRITE_INTERVAL_S = 1.0
_WRITE_TIMEOUT_S = 2.0


class Recorder:
    """Counts for one rank. `scheduler_call` and `room_opened` are for the scheduler thread, the
    rest for the loop thread.

    Args:
        classes: which classes serve, by role ("manager": "package.module.Class", …).
        directory: where to keep the file, or None.
        story_rooms: how many ended rooms `sglang-mooncake explain` can be asked about.
    """

    def __init__(
        self,
        context: RankContext,
        classes: dict[str, str],
        engine_stats: Callable[[], te.Stats],
        directory: Path | None,
        story_rooms: int = STORY_ROOMS,
    ) -> None:
        self._context, self._classes, self._engine_stats = context, classes, engine_stats
        self._path = directory / f"{context.role}-{os.getpid()}.json" if directory else None
        self.stories = Stories(story_rooms)
        self._listeners: list[Callable[[RoomStory], None]] = []
        self._opening: list[Callable[[Room], None]] = []
        self._rooms: Counter[str] = Counter()
        #: Written once by the rank's side: the rooms that are not over. Any thread may call it.
        self.open_rooms: Callable[[], Sequence[Room]] = tuple
        self.failures = Failures()
        #: Written once by the side of a decode rank: which prefill servers and this rank do not
        #: serve each other. Any thread may call it.
        self.refused: Callable[[], tuple[RefusedServer, ...]] | None = None
        self._bytes = 0
        #: Of the thread for digests alone.
        self._digested = [0, 0, 0.0]
        self._compared = dict.fromkeys(COMPARED, 0)
        self._in_flight = 0
        self._busy_since_s = 0.0
        self._busy_s = 0.0
        self._pace = Pace()
        self._bytes_early = 0
        self._fallbacks: Counter[str] = Counter()
        self._fallbacks_lock = threading.Lock()
        self._hooks_us: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self._handover_ms: deque[float] = deque(maxlen=_SAMPLES_MAX)
        self._calls_us: dict[str, deque[float]] = {
            name: deque(maxlen=_SAMPLES_MAX) for name in _CALLS
        }
        self._calls, self._calls_ns = dict.fromkeys(_CALLS, 0), dict.fromkeys(_CALLS, 0)
        self._ends: Counter[str] = Counter()
        self._write_lock = threading.Lock()  # the thread that writes and the one that exits
        self._closing = threading.Event()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atexit.register(self.close)
            # A disk or a file server may take its time: nobody else's thread waits for it.
            threading.Thread(target=self._keep_file, name="kv-stats", daemon=True).start()

    @contextmanager
    def scheduler_call(self, name: str) -> Iterator[None]:
        """Measures one call that SGLang's scheduler makes ("send" or "poll")."""
        began_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            took_ns = time.perf_counter_ns() - began_ns
            self._calls_us[name].append(took_ns / 1000)
            self._calls[name] += 1
            self._calls_ns[name] += took_ns

    def transfer_began(self, now_s: float) -> None:
        if not self._in_flight:
            self._busy_since_s = now_s
        self._in_flight += 1
        self._pace.began(now_s)

    def transfer_ended(self, nbytes: int, now_s: float) -> None:
        self._in_flight -= 1
        self._bytes += nbytes
        self._pace.ended(nbytes, now_s)
        if not self._in_flight:
            self._busy_s += now_s - self._busy_since_s

    def digested(self, cells: int, nbytes: int, spent_s: float) -> None:
        """Digests of so many cells were made. For the thread that makes them."""
        self._digested = [
            before + more
            for before, more in zip(self._digested, (cells, nbytes, spent_s), strict=True)
        ]

    def compared(self, outcome: str) -> None:
        """What came of comparing what one prefill rank has sent for a room, of `COMPARED`. For the
        same thread."""
        self._compared[outcome] += 1

    @property
    def bytes_per_s(self) -> float:
        """At which rate bytes land, as measured; any thread may ask."""
        return self._pace.bytes_per_s

    def landed_early(self, nbytes: int) -> None:
        """Of the bytes of caches: written while the forward that fills the rest went on."""
        self._bytes_early += nbytes

    def fell_back(self, reason: str) -> None:
        """Something that could have gone layer by layer did not. Any thread may tell."""
        with self._fallbacks_lock:
            self._fallbacks[reason] += 1

    def forward_hooked(self, hooks_us: float) -> None:
        """How long the hooks of one forward took, in the scheduler thread."""
        self._hooks_us.append(hooks_us)

    def handed_over(self, latency_s: float) -> None:
        """The last chunk's way from `send()` to the destination's memory."""
        self._handover_ms.append(latency_s * 1000)

    def room_opened(self, room: Room) -> None:
        """The scheduler thread says so."""
        for listener in self._opening:
            listener(room)

    def on_room_opened(self, listener: Callable[[Room], None]) -> None:
        """Has `listener` called on the scheduler thread with each room, before anything happens
        to it."""
        self._opening.append(listener)

    def on_room_over(self, listener: Callable[[RoomStory], None]) -> None:
        """Has `listener` called on the loop thread with the story of each room that is over."""
        self._listeners.append(listener)

    def room_over(self, room: Room, writes: Sequence[WriteStory] = ()) -> None:
        """`writes`: those of a prefill rank, in the order in which they ended."""
        now_s, view = time.monotonic(), room.view
        story = tell(room, self._context.role, self._context.name, now_s, writes=writes)
        if writes and view.state is RoomState.DONE:
            self.handed_over(now_s - view.times.named_s)
        self._ends[story.end] += 1
        match view.state:
            case RoomState.DONE:
                self._rooms["done"] += 1
            case RoomState.ABORTED | RoomState.SUPERSEDED:
                self._rooms["aborted"] += 1
            case _:
                self._rooms["failed"] += 1
                self.failures.note(view.reason)
        self.stories.add(story)
        for listener in self._listeners:
            listener(story)

    def rooms(self) -> dict[str, int]:
        """How many rooms ended how, and how many are open. Any thread may ask."""
        ends = {end: self._rooms[end] for end in ("done", "failed", "aborted")}
        return ends | {"open": len(self.open_rooms())}

    def totals(self) -> dict[str, Any]:
        """What only rises, for metrics: rooms by how they ended (`RoomState`), bytes, fall-backs by
        reason, calls of the scheduler with their seconds. Any thread may ask."""
        with self._fallbacks_lock:
            fallbacks = dict(self._fallbacks)
        return {
            "ends": self._ends.copy(),
            "bytes": self._bytes,
            "bytes_early": self._bytes_early,
            "digests": self._digests(),
            "fallbacks": fallbacks,
            "calls": {name: (self._calls[name], self._calls_ns[name] / 1e9) for name in _CALLS},
        }

    def _digests(self) -> dict[str, float]:
        cells, nbytes, spent_s = self._digested
        return {"cells": cells, "bytes": nbytes, "seconds": spent_s, **self._compared}

    def snapshot(self) -> dict[str, Any]:
        """Everything, as it goes into the file."""
        stats, coords = self._engine_stats(), self._context.coords
        with self._fallbacks_lock:
            fallbacks = dict(self._fallbacks)
        return {
            "version": STATS_VERSION,
            "pid": os.getpid(),
            "role": self._context.role,
            "rank": {"dp": coords.dp, "cp": coords.cp, "tp": coords.tp, "pp": coords.pp},
            "classes": self._classes,
            # What carries bytes, not what is on offer; empty on a rank that writes to nobody.
            "transport": ",".join(sorted({name for name, _ in stats.peer_transports.values()})),
            # What the slowest way to a peer carries at best; 0.0 if nobody tells.
            "bytes_per_s_at_best": min(filter(None, stats.peer_bytes_per_s.values()), default=0.0),
            "rails": stats.rails,
            "rooms": self.rooms(),
            "bytes": self._bytes,
            "busy_s": self._busy_s,
            "bytes_early": self._bytes_early,
            "digests": self._digests(),
            "fallbacks": fallbacks,
            "hooks_us": list(self._hooks_us),
            "handover_ms": list(self._handover_ms),
            "scheduler_call_us": {name: list(calls) for name, calls in self._calls_us.items()},
        }

    def close(self) -> None:
        """Writes the file once more, and then no more. Idempotent."""
        if self._path is not None and not self._closing.is_set():
            self._closing.set()
            self._write()

    def _keep_file(self) -> None:
        self._write()  # at once: the file is also the proof of who serves
        while not self._closing.wait(_WRITE_INTERVAL_S):
            self._write()

    def _write(self) -> None:
        """Replaces the file in one step, so that a reader never sees half of it."""
        assert self._path is not None
        if not self._write_lock.acquire(timeout=_WRITE_TIMEOUT_S):
            logger.warning(
                "writing the statistics file %s takes more than %g s", self._path, _WRITE_TIMEOUT_S
            )
            return
        try:
            temporary = self._path.with_suffix(".tmp")
            temporary.write_bytes(msgspec.json.encode(self.snapshot()))
            temporary.replace(self._path)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._path, error)
        finally:
            self._write_lock.release()
