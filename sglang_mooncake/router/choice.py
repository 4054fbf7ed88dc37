# SPDX-License-Identifier: Apache-2.0
"""Which server a request goes to, where its cache does not matter. Pure: chance is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from sglang_mooncake.router.servers import Server

__all__ = ["Chooser"]

_OF_TWO: Final = 2


class Chooser:
    """The choice among the servers of one role, by a policy of ``options.POLICIES``. With
    ``cache_aware`` it is that with the fewest requests under way."""

    def __init__(self, policy: str, random: Random) -> None:
        self._policy = policy
        self._random = random
        self._turn = 0

    def choose(self, servers: Sequence[Server]) -> Server:
        """One of ``servers``, of which there is at least one."""
        if self._policy == "round_robin":
            self._turn += 1
            return servers[(self._turn - 1) % len(servers)]
        if self._policy == "random" or len(servers) < _OF_TWO:
            return self._random.choice(servers)
        count = _OF_TWO if self._policy == "power_of_two" else len(servers)
        # The first of those in random order wins a tie, which is as random.
        return min(self._random.sample(servers, count), key=lambda one: one.under_way)
