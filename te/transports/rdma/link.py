# SPDX-License-Identifier: Apache-2.0
"""An outgoing link over RDMA. The link's worker keeps its rails (``rails.pxd``) and asks for each
that is to be made; here is what makes one attempt at it, and what is told of rails."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, NamedTuple

from te.errors import Error
from te.stats import RailFlow, RailStats
from te.transports.base import Local, OutgoingLink
from te.transports.rdma._core import RdmaLink
from te.transports.rdma.direct import BUILD_TIMEOUT_S, Greet, Path, build_rail
from te.transports.rdma.messages import CardNic
from te.transports.rdma.rails import RailState
from te.transports.rdma.reasons import RailReason, rail_sentence
from te.transports.rdma.striping import nominal

__all__ = ["RailRow", "RailedLink"]

logger = logging.getLogger(__name__)

# Of one rail at a time: siw dials inside the kernel, which goes on after our deadline until TCP
# hears something, or the neighbour is known to be gone; by then, after 10 s, four have begun.
ATTEMPTS_MAX: Final = 5
PROBE_TIMEOUT_S: Final = 2.0
BACKOFF_S: Final = 0.05
STEADY_S: Final = 10.0

_WORDS: Final = {
    RailState.RAIL_DOWN: "down",
    RailState.RAIL_BUILDING: "rebuild",
    RailState.RAIL_PROBED: "probe",
    RailState.RAIL_UP: "up",
    RailState.RAIL_SUSPECT: "suspect",
    # Its queue pair is gone; what had landed users need not know.
    RailState.RAIL_UNSETTLED: "down",
}
"""``RailStats.state``."""


class RailRow(NamedTuple):
    """A rail as the link's worker has it: ``RdmaLink.rails_now``."""

    state: int
    epoch: int
    way: int
    failures: int
    downs: int
    ups: int
    has_carried: bool
    code: int
    errnum: int
    text: str
    in_flight_nbytes: int
    bytes_per_s: float


class RailedLink(OutgoingLink):
    """An outgoing link over RDMA. Any thread may read it."""

    handle: RdmaLink

    def __init__(
        self,
        handle: RdmaLink,
        local: Local,
        engine_id: str,
        nics: list[CardNic],
        greet: Greet,
        ways: list[list[Path]],
    ) -> None:
        """``handle``: without its connection yet. ``engine_id`` and ``nics``: of the engine at the
        other end. ``ways``: for each rail the paths that it could take, the likeliest first."""
        super().__init__(handle)
        self._local = local
        self._engine_id = engine_id
        self._nics = nics
        self._greet = greet
        self._ways = ways
        #: Notified whenever rails have changed, or the link has ended.
        self._changed = threading.Condition()
        #: Of each rail, what was last told of it. The accepting thread's alone.
        self._told: list[RailRow | None] = [None] * len(ways)
        #: Attempts that have not ended, also those that are too late; under the condition's lock.
        self._attempts = [0] * len(ways)
        config = local.config
        self._late = (
            BUILD_TIMEOUT_S + 0.5,
            min(config.rail_timeout_s, PROBE_TIMEOUT_S) + 0.5,
        )
        near = [one[0].nic for one in ways]
        rates = nominal([nic.bytes_per_s for nic in near])
        handle.plan_rails(
            [(nic.index, rate, len(one)) for nic, rate, one in zip(near, rates, ways, strict=True)],
            *self._late,
            min(BACKOFF_S, config.rail_backoff_max_s),
            config.rail_backoff_max_s,
            STEADY_S,
        )

    @property
    def rows(self) -> list[RailRow]:
        """Every rail, as it is now."""
        return [RailRow(*one) for one in self.handle.rails_now()]

    @property
    def rails(self) -> int:
        """Those that are up."""
        return sum(row.state == RailState.RAIL_UP for row in self.rows)

    @property
    def bytes_per_s(self) -> float:
        """The sum of the devices by which rails are up."""
        up = [
            ways[row.way].nic
            for row, ways in zip(self.rows, self._ways, strict=True)
            if row.state == RailState.RAIL_UP
        ]
        return sum({nic.name: nic.bytes_per_s for nic in up}.values())

    def rail_stats(self, flows: list[tuple[int, int]]) -> tuple[RailStats, ...]:
        """See ``OutgoingLink.rail_stats``."""
        return tuple(
            RailStats(
                self._name(i, row),
                _WORDS[RailState(row.state)],
                RailFlow(*flow),
                row.in_flight_nbytes,
                row.bytes_per_s,
                self._reason(row),
            )
            for i, (row, flow) in enumerate(zip(self.rows, flows, strict=False))
        )

    def await_rails(self, deadline_s: float) -> str | None:
        """Waits until each rail is up or was tried once in every way, or the link has ended; why
        none is up, or None."""
        with self._changed:
            while self.alive and not all(
                row.state == RailState.RAIL_UP or row.downs >= len(ways)
                for row, ways in zip(self.rows, self._ways, strict=True)
            ):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
        rows = self.rows
        if not self.alive:
            return "the link has ended"
        if any(row.state == RailState.RAIL_UP for row in rows):
            return None
        return "; ".join(
            f"rail {i} by {ways[row.way]}: {self._reason(row) or 'no answer in time'}"
            for i, (row, ways) in enumerate(zip(rows, self._ways, strict=True))
        )

    def look(self) -> None:
        """Something has become of the link: begins the attempts that it asks for, and logs what is
        new. Accepting thread only."""
        rows = self.rows
        for i, row in enumerate(rows):
            told, self._told[i] = self._told[i], row
            self._log(i, told, row)
            if row.state == RailState.RAIL_BUILDING and (told is None or told.epoch != row.epoch):
                self._begin(i, row.epoch, self._ways[i][row.way])
        with self._changed:
            self._changed.notify_all()

    def _name(self, index: int, row: RailRow) -> str:
        return str(self._ways[index][row.way])

    def _reason(self, row: RailRow) -> str:
        """Why it last failed; empty if it never did."""
        if not row.code:
            return ""
        if row.code == RailReason.ATTEMPT_FAILED:
            return row.text
        return rail_sentence(row.code, row.errnum, self._local.config.rail_timeout_s, self._late)

    def _log(self, index: int, told: RailRow | None, row: RailRow) -> None:
        downs, ups, was = (
            (told.downs, told.ups, told.state) if told else (0, 0, RailState.RAIL_DOWN)
        )
        who, path = self._engine_id, self._ways[index][row.way]
        if row.downs > downs:
            level = logging.WARNING if row.has_carried or downs == 0 else logging.INFO
            why = self._reason(row)
            logger.log(level, "rail %d to %s by %s is down: %s", index, who, path, why)
        if row.ups > ups:
            logger.info("rail %d to %s is up: %s", index, who, path)
        elif was == RailState.RAIL_SUSPECT and row.state == RailState.RAIL_UP:
            logger.info("rail %d to %s makes progress again", index, who)
        if row.state == RailState.RAIL_SUSPECT and (was != RailState.RAIL_SUSPECT or row.ups > ups):
            logger.info(
                "rail %d to %s makes no progress: the other rails take over its work", index, who
            )

    def _begin(self, index: int, epoch: int, path: Path) -> None:
        with self._changed:
            under_way = self._attempts[index]
            if under_way < ATTEMPTS_MAX:
                self._attempts[index] += 1
        if under_way == ATTEMPTS_MAX:
            why = f"{under_way} attempts to make the rail are still blocked in the device"
            self.handle.refuse_rail(index, epoch, why)
        elif not self._local.run(lambda: self._build(index, epoch, path)):
            self._has_ended(index)
            self.handle.refuse_rail(index, epoch, "no thread can be started to make the rail")

    def _build(self, index: int, epoch: int, path: Path) -> None:
        """One attempt, on a thread of the pool."""
        row = self.rows[index]
        try:
            if (row.state, row.epoch) != (RailState.RAIL_BUILDING, epoch):
                return  # Its deadline passed before a thread was free.
            remote = self._nics[path.remote]
            build_rail(self._local, self.handle, remote, index, epoch, path, self._greet)
        except (OSError, Error) as exc:
            reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
            self.handle.refuse_rail(index, epoch, reason)
        finally:
            self._has_ended(index)

    def _has_ended(self, index: int) -> None:
        """One attempt."""
        with self._changed:
            self._attempts[index] -= 1
