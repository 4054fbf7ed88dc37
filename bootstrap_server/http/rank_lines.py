# SPDX-License-Identifier: Apache-2.0
"""What the log says of ranks that come and go."""

from __future__ import annotations

import logging
from typing import Final

from bootstrap_server.admission.refusals import Pace
from bootstrap_server.ranks.instance import InstanceTable
from bootstrap_server.ranks.records import Rank, RankCoords

__all__ = ["RankLines"]

logger = logging.getLogger(__name__)

#: Lines at once, where everybody may register ranks: those of a server with two of eight.
BURST: Final = 16


class RankLines:
    """Without a secret strangers may register ranks of their own, in instances of their own, and
    leave them: then few of these lines are written (`Pace`)."""

    def __init__(self, *, has_secret: bool) -> None:
        self._pace = None if has_secret else Pace(BURST)

    def registered(self, rank: Rank, table: InstanceTable) -> None:
        """A rank, and its instance with it."""
        self._write(
            logging.INFO,
            "rank %s of instance %s registered from %s port %d (%d of %d)",
            rank.coords,
            table.name,
            rank.host,
            rank.port,
            table.registered,
            table.expected,
        )

    def began_anew(self, rank: Rank, table: InstanceTable) -> None:
        """An instance has another configuration since this rank has registered."""
        self._write(
            logging.WARNING,
            "generation %d of instance %s begins: rank %s has a configuration that differs "
            "from the former ranks'",
            table.generation,
            table.name,
            rank.coords,
        )

    def lapsed(self, name: str, rank: Rank) -> None:
        """A rank of the instance `name` was forgotten."""
        self._write(
            logging.WARNING,
            "rank %s of instance %s, at %s port %d, has not renewed its lease and was removed "
            "from the registry",
            rank.coords,
            name,
            rank.host,
            rank.port,
        )

    def ended(self, name: str, rank: Rank) -> None:
        """The process of a rank of the instance `name` has ended, and its place is free."""
        self._write(
            logging.WARNING,
            "rank %s of instance %s, at %s port %d, has ended and was removed from the registry: "
            "its connection is closed, and nothing of it listens on its port",
            rank.coords,
            name,
            rank.host,
            rank.port,
        )

    def shut_down(self, name: str, coords: RankCoords) -> None:
        """A rank of the instance `name` gave its place back."""
        self._write(logging.INFO, "rank %s of instance %s was shut down", coords, name)

    def _write(self, level: int, message: str, *values: object) -> None:
        left_out = 0 if self._pace is None else self._pace.left_out()
        if left_out is None:
            return
        more = f" ({left_out} earlier lines about ranks were left out)" if left_out else ""
        logger.log(level, message + "%s", *values, more)
