# SPDX-License-Identifier: Apache-2.0
"""Which simulated instance gets a prompt: rules of others, and the router's own. Pure.

What a router knows is what it would know of real servers: what it has sent where, what of it has
ended and when, and what servers tell of their caches.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from kvstore_tools.traces import BLOCK_TOKENS, Request
from sglang_mooncake.router.cache_view import Named
from sglang_mooncake.router.fit import Kin
from sglang_mooncake.router.placement import Look, Placed, PrefillView, place
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import Told

__all__ = ["ROUTINGS", "Chosen", "Found", "Memory", "Routing", "routing_of"]

ROUTINGS: Final = ("random", "balanced", "sglang", "aware", "router")
"""How an instance is chosen: at random; the one that is free first; as SGLang's router does
(`_SGLangsOwn`); the one that is expected to be done first, with what is cached where; by the rules
of `sglang-mooncake router`, which have to learn from what was computed how long that takes."""

_NAME_BYTES: Final = 8


class Found(NamedTuple):
    """What of a prompt needs no computing at an instance, in tokens."""

    tokens: int
    #: Those of them that lie at other instances.
    remote: int


class Chosen(NamedTuple):
    """An instance, and after how long it is expected to have computed the prompt; None: nothing is
    expected."""

    place: int
    first_s: float | None = None


class Memory(Protocol):
    """What is cached where, and what computing and loading take."""

    instances: int
    pooled: bool

    def found(self, request: Request, place: int) -> Found:
        """The last token is computed in any case."""

    def held(self, request: Request, place: int) -> int:
        """How many blocks of its beginning the instance's own memory has."""

    def stored(self, blocks: Sequence[int]) -> int:
        """How many of these, from the first on, lie anywhere; for a pool."""

    def work_s(self, request: Request, place: int) -> float:
        """Until the instance has computed the prompt, if nothing else is to be done."""


class Routing(Protocol):
    """One way to choose."""

    def choose(self, number: int, request: Request, now_s: float, /) -> Chosen | None:
        """For a prompt that has come, with its number; None: it is refused."""

    def ended(self, number: int, now_s: float, cached: int, /) -> None:
        """A prompt is computed, of which so many tokens needed no computing."""


class _AtRandom:
    def __init__(self, memory: Memory, chance: random.Random) -> None:
        self._instances, self._chance = memory.instances, chance

    def choose(self, _number: int, _request: Request, _now_s: float) -> Chosen:
        return Chosen(self._chance.randrange(self._instances))

    def ended(self, _number: int, _now_s: float, _cached: int) -> None:
        """It keeps nothing in mind."""


class _ByWork:
    """Told how long computing and loading take: the instance that is free first, or, if it is
    ``aware``, that has the prompt computed first."""

    def __init__(self, memory: Memory, *, aware: bool) -> None:
        self._memory, self._aware = memory, aware
        #: When each is expected to have done all that it was given, and how much that is.
        self._done_s = [0.0] * memory.instances
        self._under_way = [0] * memory.instances
        self._places: dict[int, int] = {}

    def choose(self, number: int, request: Request, now_s: float) -> Chosen:
        waits_s = [max(one - now_s, 0.0) for one in self._done_s]
        costs_s = waits_s
        if self._aware:
            costs_s = [
                wait_s + self._memory.work_s(request, at) for at, wait_s in enumerate(waits_s)
            ]
        at = costs_s.index(min(costs_s))
        first_s = waits_s[at] + self._memory.work_s(request, at)
        self._done_s[at] = now_s + first_s
        self._under_way[at] += 1
        self._places[number] = at
        return Chosen(at, first_s)

    def ended(self, number: int, now_s: float, _cached: int) -> None:
        at = self._places.pop(number)
        self._under_way[at] -= 1
        if not self._under_way[at]:
            self._done_s[at] = now_s


class _SGLangsOwn:
    """The policy ``cache_aware`` of SGLang's router (sglang-router 0.3.2), as its options describe
    it. It knows what it has sent where, for ever (its memory of 67 million characters for each
    instance is not filled by any of the traces), and counts requests that have not ended."""

    #: Of the prompt that has to be known: else the instance with the fewest requests gets it.
    CACHE_THRESHOLD: Final = 0.3
    #: Where the most and the fewest requests differ by more than both of these say, the instance
    #: with the fewest gets the prompt whatever is known of it.
    BALANCE_ABS_THRESHOLD: Final = 64
    BALANCE_REL_THRESHOLD: Final = 1.5

    def __init__(self, memory: Memory) -> None:
        self._under_way = [0] * memory.instances
        self._places: dict[int, int] = {}
        #: By block, the instance that was sent it last.
        self._sent: dict[int, int] = {}

    def choose(self, number: int, request: Request, _now_s: float) -> Chosen:
        at = self._place(request)
        self._sent.update(dict.fromkeys(request.hash_ids, at))
        self._under_way[at] += 1
        self._places[number] = at
        return Chosen(at)

    def ended(self, number: int, _now_s: float, _cached: int) -> None:
        self._under_way[self._places.pop(number)] -= 1

    def _place(self, request: Request) -> int:
        least, most = min(self._under_way), max(self._under_way)
        fewest = self._under_way.index(least)
        if most - least > self.BALANCE_ABS_THRESHOLD and most > least * self.BALANCE_REL_THRESHOLD:
            return fewest
        blocks = request.hash_ids
        known = next((at for at, one in enumerate(blocks) if one not in self._sent), len(blocks))
        if known <= self.CACHE_THRESHOLD * len(blocks):
            return fewest
        return self._sent[blocks[known - 1]]


class _TraceLook(Look):
    """A trace names the blocks of a prompt, and does not tell its tokens."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.hash_ids, BLOCK_TOKENS, request.input_length)
        self.request: Final = request

    def digests(self, page_size: int) -> Sequence[bytes]:  # noqa: ARG002
        return [one.to_bytes(_NAME_BYTES, "little") for one in self.names]


class _TracePool:
    """All memory of the simulated instances."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def first_of(self, digests: Sequence[bytes]) -> int:
        return self._memory.stored([int.from_bytes(one, "little") for one in digests])

    def told(self, expected: float, found: float) -> None:
        """The simulation compares all that it wants to know itself."""


class _TraceView(PrefillView):
    """An instance that tells at once, and without gaps, what its own memory has."""

    def __init__(self, memory: Memory, at: int, kin: Kin) -> None:
        pool = _TracePool(memory) if memory.pooled else None
        super().__init__(Server("prefill", f"http://{at}"), pool, kin)
        self.page_size = BLOCK_TOKENS
        self.at: Final = at
        self._memory = memory

    def told_tokens(self, look: Named, now_s: float) -> float:  # noqa: ARG002
        assert isinstance(look, _TraceLook)
        return self._memory.held(look.request, self.at) * BLOCK_TOKENS


class _RoutersOwn:
    """What `sglang-mooncake router` keeps of its prefill servers, and its choice. With ``limit_s``
    it refuses what is late (`--max-ttft-secs`)."""

    def __init__(self, memory: Memory, chance: random.Random, limit_s: float | None) -> None:
        kin = Kin()
        self._views = [_TraceView(memory, at, kin) for at in range(memory.instances)]
        self._chance, self._limit_s = chance, limit_s
        self._placed: dict[int, Placed] = {}

    def choose(self, number: int, request: Request, now_s: float) -> Chosen | None:
        look = _TraceLook(request)
        choice = place(look, self._views, now_s, self._chance, self._limit_s)
        if choice.late_s > 0.0:
            return None
        assert isinstance(choice.view, _TraceView)
        placed = choice.view.send(look, choice.figures, now_s)
        self._placed[number] = placed
        return Chosen(choice.view.at, placed.expected.first_s)

    def ended(self, number: int, now_s: float, cached: int) -> None:
        placed = self._placed.pop(number)
        assert isinstance(placed.look, _TraceLook)
        placed.view.ended(placed, now_s, Told(placed.look.request.input_length, cached))


def routing_of(
    name: str, memory: Memory, chance: random.Random, limit_s: float | None = None
) -> Routing:
    """``name``: one of ``ROUTINGS``; ``limit_s``: after which the router refuses."""
    if name == "random":
        return _AtRandom(memory, chance)
    if name == "sglang":
        return _SGLangsOwn(memory)
    if name == "router":
        return _RoutersOwn(memory, chance, limit_s)
    return _ByWork(memory, aware=name == "aware")
