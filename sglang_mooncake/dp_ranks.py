# SPDX-License-Identifier: Apache-2.0
"""Tells the registry which DP rank of a prefill server has a room, where decode servers cannot work
that out of the room's number.

It has threads of its own: a registry that does not answer holds each of them for seconds, and the
data paths to decode ranks must not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from bootstrap_server import BootstrapError
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.workers import Workers

__all__ = ["DpRankNotices"]

logger = logging.getLogger(__name__)

THREADS = 4
#: Rooms whose registry has yet to be told: more than a prefill rank has in its queues.
ROOMS_MAX = 16_384


class DpRankNotices:
    """`tell` is for the scheduler thread: it costs microseconds and never waits.

    Args:
        register: tells the registry of one room; may block. Raises BootstrapError.
        failed: called in a thread, or at once, with the room that decode servers will not find,
            and the reason.
    """

    def __init__(
        self,
        register: Callable[[int], None],
        failed: Callable[[Room, str], None],
    ) -> None:
        self._register, self._failed = register, failed
        self._workers = Workers("kv-dp-rank", THREADS, ROOMS_MAX)

    def tell(self, room: Room) -> None:
        """Has the registry told. A room that ends before its turn is left out: its deadline counts
        from its beginning, so nothing waits here for longer than that."""
        if not self._workers.submit(lambda waited_s: self._tell(room, waited_s)):
            self._failed(
                room,
                "cannot tell the bootstrap server which DP rank has the room: "
                f"{ROOMS_MAX} rooms wait for that already",
            )

    def close(self) -> None:
        self._workers.close()

    def _tell(self, room: Room, waited_s: float) -> None:
        if room.view.decided:
            return
        try:
            self._register(room.number)
            return
        except BootstrapError as error:
            problem = str(error)
        except Exception as error:  # the room must end, whatever it was
            logger.exception(
                "could not tell the registry which DP rank serves room %d", room.number
            )
            problem = f"internal error: {error!r}"
        waited = f" (after {waited_s:.1f} s behind other rooms)" if waited_s >= 1 else ""
        self._failed(
            room, f"cannot tell the bootstrap server which DP rank has the room{waited}: {problem}"
        )
