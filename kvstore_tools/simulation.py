# SPDX-License-Identifier: Apache-2.0
"""How long recorded requests would have waited for their first token, with caches of one kind or
another. A discrete-event simulation; pure.

Each prefill instance computes one prompt at a time, in the order in which they come. A prompt's KV
cache is stored when it is computed. What is found of it when its turn comes is not computed; what
lies at another instance has to come through this instance's network first, from the prompt's
arrival on, one prompt after the other. What other instances send at the same time does not slow a
transfer down, and decoding is left out.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from kvstore_tools.traces import BLOCK_TOKENS, BlockCache, Request
from sglang_mooncake.router.fit import Kin, WorkFit
from sglang_mooncake.router.known import first_of
from sglang_mooncake.router.placement import Figures, best, expect, left_s

__all__ = ["ROUTINGS", "Cluster", "Outcome", "Rates", "capacity", "simulate"]

ROUTINGS: Final = ("random", "balanced", "aware", "router")
"""How an instance is chosen: at random; the one that is free first; the one that is expected to be
done first, with what is cached where; by the choice of `sglang-mooncake router`, which knows what
is cached where and in queues, and has to learn from what was computed how long that takes."""
FACTOR_MIN, FACTOR_MAX, FACTOR_STEP = 1 / 16, 64.0, 1.02
"""Between which arrival rates ``capacity`` looks, in times the trace's, and how closely."""
IN_TIME: Final = 0.9
"""The part of the requests that has to keep the limit."""


@dataclass(frozen=True)
class Rates:
    """What computing and loading take.

    The defaults are of a model as Llama 3 70B on 8 A800: 2 operations for each of 70e9 parameters,
    and 4 for each pair of tokens, layer (80) and dimension (8,192), at half of 8 × 312 TFLOP/s.
    They give what is published for a prompt of 128 k tokens of which 95 % are cached: it takes 92 %
    less time to compute.
    """

    #: Of a token without its attention.
    token_s: float = 112e-6
    #: Of the attention of a token to one before it.
    pair_s: float = 2.1e-9
    kv_bytes_per_token: int = 327_680
    #: Into each instance.
    network_bytes_per_s: float = 25e9

    def compute_s(self, tokens: int, cached: int) -> float:
        """Of a prompt of which the first tokens are cached."""
        new = tokens - cached
        return self.token_s * new + self.pair_s * new * (cached + new / 2)

    def load_s(self, tokens: int) -> float:
        """Of tokens that lie at another instance."""
        return tokens * self.kv_bytes_per_token / self.network_bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """Prefill instances and their caches."""

    instances: int = 10
    #: Blocks that each one has memory for; 0: nothing is cached.
    blocks_each: int = 5_859
    #: Whether each uses what all have.
    pooled: bool = False
    #: One of ``ROUTINGS``.
    routing: str = "balanced"
    policy: str = "lru"
    #: Of ``random``.
    seed: int = 0
    rates: Rates = field(default_factory=Rates)


@dataclass(frozen=True)
class Outcome:
    """What became of all requests."""

    #: Of each request, in the order of the trace.
    ttft_s: Sequence[float]
    #: Of all prompts, and those of them that were not computed.
    tokens: int
    cached_tokens: int
    #: For which instances computed, in sum.
    compute_s: float

    @property
    def hit_ratio(self) -> float:
        """Cached tokens of all."""
        return self.cached_tokens / self.tokens if self.tokens else 0.0

    @property
    def mean_s(self) -> float:
        """Of the times to the first token."""
        return sum(self.ttft_s) / len(self.ttft_s)

    def percentile_s(self, part: float) -> float:
        """The time to the first token that this part of the requests keeps."""
        ordered = sorted(self.ttft_s)
        return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


class _Instance:
    """Its queue, its processor and its network."""

    def __init__(self, cache: BlockCache | None, kin: Kin) -> None:
        self.cache = cache
        self.queue: deque[int] = deque()
        self.is_busy = False
        self.network_free_s = 0.0
        #: When it is expected to have done all that it was given.
        self.done_s = 0.0
        #: What the router has learnt of it, and expects of the prompts that have not ended.
        self.fit = WorkFit(kin)
        self.expected_s: deque[float] = deque()
        self.queued: Counter[int] = Counter()
        #: When the first of those began, and how many tokens of it are computed.
        self.begun_s = 0.0
        self.computed = 0

    def expected_wait_s(self, now_s: float) -> float:
        """As the router reckons it."""
        if not self.expected_s:
            return 0.0
        first_s = self.expected_s[0]
        rest_s = left_s(first_s, max(now_s - self.begun_s, 0.0))
        return sum(self.expected_s) - first_s + rest_s


class _Simulation:
    def __init__(self, requests: Sequence[Request], cluster: Cluster, factor: float) -> None:
        self._requests = requests
        self._cluster = cluster
        self._rates = cluster.rates
        self._arrivals_s = [one.timestamp / 1e3 / factor for one in requests]
        self._random = random.Random(cluster.seed)
        caches = [self._cache(1) for _ in range(cluster.instances)]
        if cluster.pooled:
            caches = [self._cache(cluster.instances)] * cluster.instances
        kin = Kin()
        self._instances = [_Instance(one, kin) for one in caches]
        #: Where each block was computed, if all use it.
        self._holders: dict[int, int] = {}
        self._ends: list[tuple[float, int, int]] = []
        self._ttft_s = [0.0] * len(requests)
        self._cached_tokens = 0
        self._compute_s = 0.0

    def _cache(self, shares: int) -> BlockCache | None:
        blocks = self._cluster.blocks_each * shares
        return BlockCache(self._cluster.policy, blocks) if blocks else None

    def run(self) -> Outcome:
        """All events in the order of their times: a prompt arrives, or was computed."""
        for number, arrival_s in enumerate(self._arrivals_s):
            while self._ends and self._ends[0][0] <= arrival_s:
                self._end(*heapq.heappop(self._ends))
            self._arrive(number, arrival_s)
        while self._ends:
            self._end(*heapq.heappop(self._ends))
        tokens = sum(one.input_length for one in self._requests)
        return Outcome(self._ttft_s, tokens, self._cached_tokens, self._compute_s)

    def _arrive(self, number: int, now_s: float) -> None:
        place, expected_s = self._choose(number, now_s)
        instance = self._instances[place]
        instance.done_s = max(instance.done_s, now_s) + expected_s
        instance.queue.append(number)
        instance.expected_s.append(expected_s)
        instance.queued.update(self._requests[number].hash_ids)
        if not instance.is_busy:
            self._begin(place, now_s)

    def _choose(self, number: int, now_s: float) -> tuple[int, float]:
        """The instance, and how long it is expected to be busy with the prompt."""
        routing = self._cluster.routing
        if routing == "random":
            place = self._random.randrange(len(self._instances))
            return place, self._work_s(number, place)
        if routing == "router":
            return self._routed(number, now_s)
        waits_s = [max(one.done_s - now_s, 0.0) for one in self._instances]
        if routing == "balanced":
            place = waits_s.index(min(waits_s))
            return place, self._work_s(number, place)
        work_s = [self._work_s(number, place) for place in range(len(self._instances))]
        totals_s = [wait_s + one_s for wait_s, one_s in zip(waits_s, work_s, strict=True)]
        place = totals_s.index(min(totals_s))
        return place, work_s[place]

    def _routed(self, number: int, now_s: float) -> tuple[int, float]:
        request = self._requests[number]
        figures = []
        for place, one in enumerate(self._instances):
            hits = self._found(number, place)[0]
            if one.cache is not None:
                queued = first_of(one.queued, request.hash_ids) * BLOCK_TOKENS
                hits = max(hits, min(queued, max(request.input_length - 1, 0)))
            wait_s, fit = one.expected_wait_s(now_s), one.fit
            under_way = len(one.expected_s)
            figures.append(Figures(wait_s, fit.fixed_s, fit.token_s, hits, under_way))
        place = best(request.input_length, figures, self._random)
        return place, expect(request.input_length, figures[place]).work_s

    def _work_s(self, number: int, place: int) -> float:
        cached, remote = self._found(number, place)
        computed_s = self._rates.compute_s(self._requests[number].input_length, cached)
        return computed_s + self._rates.load_s(remote)

    def _found(self, number: int, place: int) -> tuple[int, int]:
        """Tokens that are cached, and those of them that lie at another instance. The last token is
        computed in any case."""
        request, cache = self._requests[number], self._instances[place].cache
        if cache is None:
            return 0, 0
        run = cache.run(request.hash_ids)
        tokens = min(run * BLOCK_TOKENS, max(request.input_length - 1, 0))
        if not self._cluster.pooled:
            return tokens, 0
        remote = sum(self._holders[one] != place for one in request.hash_ids[:run])
        return tokens, min(remote * BLOCK_TOKENS, tokens)

    def _begin(self, place: int, now_s: float) -> None:
        """The instance has nothing else to do than the first prompt of its queue."""
        instance = self._instances[place]
        number = instance.queue.popleft()
        instance.is_busy = True
        cached, remote = self._found(number, place)
        start_s = now_s
        if remote:
            begun_s = max(self._arrivals_s[number], instance.network_free_s)
            instance.network_free_s = begun_s + self._rates.load_s(remote)
            start_s = max(now_s, instance.network_free_s)
        compute_s = self._rates.compute_s(self._requests[number].input_length, cached)
        instance.begun_s, instance.computed = now_s, self._requests[number].input_length - cached
        self._cached_tokens += cached
        self._compute_s += compute_s
        heapq.heappush(self._ends, (start_s + compute_s, number, place))

    def _end(self, now_s: float, number: int, place: int) -> None:
        instance = self._instances[place]
        blocks = self._requests[number].hash_ids
        self._ttft_s[number] = now_s - self._arrivals_s[number]
        instance.fit.learn(instance.computed, now_s - instance.begun_s)
        instance.expected_s.popleft()
        for block in blocks:
            instance.queued[block] -= 1
            if not instance.queued[block]:
                del instance.queued[block]
        if instance.cache is not None:
            if self._cluster.pooled:
                new = blocks[instance.cache.run(blocks) :]
                self._holders.update(dict.fromkeys(new, place))
            instance.cache.use(blocks)
        instance.is_busy = False
        if instance.queue:
            self._begin(place, now_s)
        else:
            instance.done_s = now_s


def simulate(requests: Sequence[Request], cluster: Cluster, factor: float = 1.0) -> Outcome:
    """Replays a trace, empty caches first. ``factor``: by how much faster than it was recorded.
    ``ValueError`` if there are no requests, or they are not in the order of their times."""
    if not requests:
        raise ValueError("there are no requests to replay")
    if any(after.timestamp < before.timestamp for before, after in pairwise(requests)):
        raise ValueError("the requests of the trace are not in the order of their timestamps")
    return _Simulation(requests, cluster, factor).run()


def capacity(requests: Sequence[Request], cluster: Cluster, limit_s: float) -> float:
    """The highest arrival rate, in times the trace's, at which ``IN_TIME`` of the requests have
    their first token within the limit; 0.0 or infinity if it lies outside of what is looked at."""

    def holds(factor: float) -> bool:
        return simulate(requests, cluster, factor).percentile_s(IN_TIME) <= limit_s

    low, high = FACTOR_MIN, FACTOR_MAX
    if not holds(low):
        return 0.0
    if holds(high):
        return float("inf")
    while high / low > FACTOR_STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
