# SPDX-License-Identifier: Apache-2.0
"""Ends the leases of ranks that have ended, when the next life of one asks for its place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bootstrap_server.http.rank_lines import RankLines
from bootstrap_server.page.board import Board
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.records import Rank
from bootstrap_server.ranks.suspects import suspects

__all__ = ["ASKED_MAX", "ASK_TIMEOUT_S", "Succession", "refuses"]

#: A host that is there refuses in less than a millisecond, or after a round trip. A client waits
#: 5 s for its answer.
ASK_TIMEOUT_S: Final = 0.5
#: Ports that are asked at once, for all newcomers together. A rank for which there is no room waits
#: for the lease, or asks again.
ASKED_MAX: Final = 64


async def refuses(host: str, port: int) -> bool:
    """Whether the host answers that nothing listens on the port. False for everything else: someone
    listens, there is no answer within `ASK_TIMEOUT_S`, or no way. Sends nothing."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except OSError:  # TimeoutError is one
        return False
    writer.transport.abort()
    return False


class Succession:
    """`clock` gives the seconds of leases. Used by the registry's event loop alone."""

    def __init__(
        self,
        board: Board,
        lines: RankLines,
        clock: Callable[[], float],
        refuses: Callable[[str, int], Awaitable[bool]] = refuses,
    ) -> None:
        self._board, self._lines, self._clock = board, lines, clock
        self._refuses = refuses
        self._asked = 0

    async def end_former(
        self, find: Callable[[], InstanceTable], newcomer: Rank, source: str
    ) -> bool:
        """End the leases of the ranks on the newcomer's host that have ended (`suspects`); whether
        there were any. `find` returns the instance, which may be another object after the wait.

        Of decode servers none: the port of a decode rank is that of its server's HTTP API, which
        may be closed while the rank lives.
        """
        table = find()
        if table.role != "prefill":
            return False
        leased = (rank for rank, renewed_s in table.live() if renewed_s is not None)
        name = table.name
        found = suspects(leased, newcomer, source, lambda rank: self._is_lost(name, rank))
        ended = [*found.replaced, *await self._refusing(found.to_ask)]
        table = find()
        # Whoever renewed meanwhile lives.
        ended = [
            rank
            for rank in ended
            if table.find(rank.coords) == rank and self._is_lost(table.name, rank)
        ]
        for rank in ended:
            table.end(rank.coords)
            self._board.lapsed(table.name, rank, self._clock())
            self._lines.ended(table.name, rank)
        return bool(ended)

    def _is_lost(self, name: str, rank: Rank) -> bool:
        shown = self._board.find(name, rank.coords)
        return shown is not None and shown.rank == rank and shown.lost_s is not None

    async def _refusing(self, ranks: tuple[Rank, ...]) -> list[Rank]:
        asked = ranks[: ASKED_MAX - self._asked]
        self._asked += len(asked)
        try:
            answers = await asyncio.gather(*(self._refuses(rank.host, rank.port) for rank in asked))
        finally:
            self._asked -= len(asked)
        return [rank for rank, answer in zip(asked, answers, strict=True) if answer]
