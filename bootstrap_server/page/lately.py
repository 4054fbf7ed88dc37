# SPDX-License-Identifier: Apache-2.0
"""What a rank's reports say of the last minutes: how its rooms ended, whether it lost decode ranks,
and whether that is trouble. Pure: time is passed in.

Reports have totals since the rank's start, in which a decode server that has just died is lost
among all that went well before.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from bootstrap_server.ranks.rank_status import RankStatus
from bootstrap_server.ranks.records import Role

__all__ = ["WINDOW_S", "Lately", "Tally", "tally_of", "trouble"]

WINDOW_S: Final = 300.0
#: Of reports that come more often, one in this time is kept.
SPACING_S: Final = 30.0
#: Fewer bad ends within the window are no trouble, whatever their part is.
FEW: Final = 5
#: Failures have causes that somebody should know. Clients may abort as they like, so of aborted
#: rooms there must be more.
FAILED_PART: Final = 0.05
ABORTED_PART: Final = 0.2


class Tally(NamedTuple):
    """Rooms that have ended, by their end, and decode ranks that the rank is connected to (a
    decode rank reports none)."""

    done: int
    failed: int
    aborted: int
    peers: int

    @property
    def ends(self) -> dict[str, int]:
        """Those of rooms, by the names that reports give them."""
        return {"done": self.done, "failed": self.failed, "aborted": self.aborted}


def tally_of(status: RankStatus) -> Tally:
    """Of one report."""
    rooms = status.rooms
    return Tally(
        rooms.get("done", 0), rooms.get("failed", 0), rooms.get("aborted", 0), status.peers_total
    )


class Lately:
    """The reports of one rank."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Tally]] = deque()
        #: What was reported last; None before the first report.
        self.newest: Tally | None = None

    def report(self, tally: Tally, now_s: float) -> None:
        """The rank has reported."""
        newest = self.newest
        if newest is not None and any(
            now < before for now, before in zip(tally[:3], newest[:3], strict=True)
        ):
            self._kept.clear()  # It counts from the start again.
        self.newest = tally
        if not self._kept or now_s - self._kept[-1][0] >= SPACING_S:
            self._kept.append((now_s, tally))
        elif tally.peers > self._kept[-1][1].peers:
            at_s, kept = self._kept[-1]
            self._kept[-1] = at_s, kept._replace(peers=tally.peers)

    def since(self, now_s: float) -> tuple[Tally, int] | None:
        """Rooms that have ended within the window, with the decode ranks that are connected now,
        and how many were at most. None before the first report."""
        if self.newest is None:
            return None
        while len(self._kept) > 1 and self._kept[1][0] <= now_s - WINDOW_S:
            self._kept.popleft()
        _, first = self._kept[0]
        new = self.newest
        ended = Tally(
            new.done - first.done, new.failed - first.failed, new.aborted - first.aborted, new.peers
        )
        return ended, max(new.peers, *(tally.peers for _, tally in self._kept))

    @property
    def served(self) -> bool:
        """Whether some room was handed over since the rank's start."""
        return self.newest is not None and self.newest.done > 0


def trouble(lately: Lately, now_s: float, role: Role = "prefill") -> str | None:
    """What an operator should look at, as a sentence without its stop; None for nothing."""
    found = lately.since(now_s)
    if found is None:
        return None
    ended, peers_before = found
    total = ended.done + ended.failed + ended.aborted
    parts = []
    if ended.failed >= FEW and ended.failed > FAILED_PART * total:
        parts.append(f"{ended.failed} of {total} rooms failed")
    if ended.aborted >= FEW and ended.aborted > ABORTED_PART * total:
        parts.append(f"{ended.aborted} of {total} rooms were aborted")
    if ended.peers < peers_before:
        parts.append(f"{peers_before - ended.peers} of {peers_before} decode ranks were lost")
    if parts:
        return f"in the last {WINDOW_S / 60:g} min {', '.join(parts)}"
    if role == "prefill" and ended.peers == 0 and lately.served:
        return "no decode rank is connected any more"
    return None
