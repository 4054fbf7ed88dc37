# SPDX-License-Identifier: Apache-2.0
"""Which server a request goes to by a policy that knows nothing of caches. Pure: chance is handed
in."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final, TypeVar

from sglang_mooncake.router.servers import Server

__all__ = ["Chooser", "any_of"]

T = TypeVar("T")
_OF_TWO: Final = 2


def any_of(ones: Sequence[T], random: Random) -> T:
    """One by chance, where there is a choice: the system's chance costs two calls of it."""
    return random.choice(ones) if len(ones) > 1 else ones[0]


class Chooser:
    """The choice among the servers of one role, by a policy of ``options.POLICIES`` other than
    ``cache_aware``."""

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
        # The first of those in random order wins a tie, which is as random.
        return min(self._random.sample(servers, _OF_TWO), key=lambda one: one.under_way)
