# SPDX-License-Identifier: Apache-2.0
"""How long recorded requests would have waited for their first token, with caches of one kind or
another. A discrete-event simulation; pure.

Each prefill instance computes one prompt at a time, in the order in which they come. A prompt's KV
cache is stored when it is computed. What is found of it when its turn comes is not computed; what
lies at another instance has to come through this instance's network first, from the prompt's
arrival on, one prompt after the other. What other instances send at the same time does not slow a
transfer down. No prompt waits for decoding (``decoding.py``).
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import Final

from kvstore_tools.decoding import Decoding, gaps_s
from kvstore_tools.routings import Found, routing_of
from kvstore_tools.traces import BLOCK_TOKENS, BlockCache, Request

__all__ = ["Cluster", "Limits", "Outcome", "Rates", "capacity", "simulate"]

FACTOR_MIN, FACTOR_MAX, FACTOR_STEP = 1 / 16, 64.0, 1.02
"""Between which arrival rates ``capacity`` looks, in times the trace's, and how closely."""
IN_TIME: Final = 0.9
"""The part of the requests that has to keep the limit."""
LEARNT: Final = 100
"""After so many requests what is expected is compared with what was."""


@dataclass(frozen=True)
class Limits:
    """What a request is to keep: for its first token, and for the time between its tokens, on
    average."""

    first_s: float = 30.0
    gap_s: float = 0.1


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
    #: Of ``random``, and of the ``jitter``.
    seed: int = 0
    #: How much longer or shorter than calculated a prompt takes to compute, by chance: the standard
    #: deviation of the logarithm.
    jitter: float = 0.0
    #: After which `router` refuses a prompt: its `--max-ttft-secs`; None: it refuses none.
    limit_s: float | None = None
    rates: Rates = field(default_factory=Rates)
    decoding: Decoding = field(default_factory=Decoding)


@dataclass(frozen=True)
class Outcome:
    """What became of all requests."""

    #: Of each request, in the order of the trace; infinite if it was refused.
    ttft_s: Sequence[float]
    #: How far apart its further tokens come, on average.
    gaps_s: Sequence[float]
    #: Of all prompts that were not refused, and those of them that were not computed.
    tokens: int
    cached_tokens: int
    #: For which instances computed, in sum.
    compute_s: float
    #: By how much the expected times to the first token were off, in parts of what they were: the
    #: median, without the first ``LEARNT`` requests; None where nothing is expected.
    error: float | None = None

    @property
    def hit_ratio(self) -> float:
        """Cached tokens of all."""
        return self.cached_tokens / self.tokens if self.tokens else 0.0

    @property
    def mean_s(self) -> float:
        """Of the times to the first token of what was not refused."""
        return fmean(one for one in self.ttft_s if math.isfinite(one))

    @property
    def refused(self) -> int:
        """How many requests."""
        return self.ttft_s.count(math.inf)

    def percentile_s(self, part: float) -> float:
        """The time to the first token that this part of the requests keeps."""
        return _percentile(self.ttft_s, part)

    def gap_s(self, part: float) -> float:
        """The time between tokens that this part of the requests keeps."""
        return _percentile(self.gaps_s, part)


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)]


class _Memory:
    """Of all instances, and what their processors and networks take."""

    def __init__(self, cluster: Cluster) -> None:
        self.instances, self.pooled = cluster.instances, cluster.pooled
        self.rates = cluster.rates
        shares = cluster.instances if cluster.pooled else 1
        blocks = cluster.blocks_each * shares
        count = 0 if not blocks else cluster.instances // shares
        caches = [BlockCache(cluster.policy, blocks) for _ in range(count)]
        self._caches = caches * shares
        #: Where each block was computed, if all use it.
        self._holders: dict[int, int] = {}

    def found(self, request: Request, place: int) -> Found:
        """The last token is computed in any case."""
        if not self._caches:
            return Found(0, 0)
        run = self._caches[place].run(request.hash_ids)
        tokens = min(run * BLOCK_TOKENS, max(request.input_length - 1, 0))
        if not self.pooled:
            return Found(tokens, 0)
        remote = sum(self._holders[one] != place for one in request.hash_ids[:run])
        return Found(tokens, min(remote * BLOCK_TOKENS, tokens))

    def held(self, request: Request, place: int) -> int:
        """How many blocks of its beginning the instance's own memory has."""
        run = self.stored(request.hash_ids, place)
        if not self.pooled:
            return run
        local = takewhile(lambda one: self._holders[one] == place, request.hash_ids[:run])
        return sum(1 for _ in local)

    def stored(self, blocks: Sequence[int], place: int = 0) -> int:
        """How many of these, from the first on, lie where the instance can load them."""
        return self._caches[place].run(blocks) if self._caches else 0

    def work_s(self, request: Request, place: int) -> float:
        """Until the instance has computed the prompt, if nothing else is to be done."""
        cached, remote = self.found(request, place)
        return self.rates.compute_s(request.input_length, cached) + self.rates.load_s(remote)

    def keep(self, blocks: Sequence[int], place: int) -> None:
        """The instance has computed them, or used them."""
        if not self._caches:
            return
        if self.pooled:
            new = blocks[self._caches[place].run(blocks) :]
            self._holders.update(dict.fromkeys(new, place))
        self._caches[place].use(blocks)


@dataclass
class _Instance:
    """Its queue, its processor and its network."""

    queue: deque[int] = field(default_factory=deque)
    is_busy: bool = False
    network_free_s: float = 0.0


class _Simulation:
    def __init__(self, requests: Sequence[Request], cluster: Cluster, factor: float) -> None:
        self._requests, self._cluster = requests, cluster
        self._rates = cluster.rates
        self._arrivals_s = [one.timestamp / 1e3 / factor for one in requests]
        self._memory = _Memory(cluster)
        chance = random.Random(cluster.seed)
        self._routing = routing_of(cluster.routing, self._memory, chance, cluster.limit_s)
        #: By how many times longer each takes than calculated.
        self._luck = [chance.lognormvariate(0.0, cluster.jitter) for _ in requests]
        self._instances = [_Instance() for _ in range(cluster.instances)]
        #: When an instance has computed a prompt, of which so many tokens needed no computing.
        self._ends: list[tuple[float, int, int, int]] = []
        self._ttft_s = [math.inf] * len(requests)
        self._expected_s: dict[int, float] = {}
        self._tokens = 0
        self._cached_tokens = 0
        self._compute_s = 0.0

    def run(self) -> Outcome:
        """To the end."""
        for _ in self._events():
            pass
        ttft_s = self._ttft_s
        errors = [
            abs(one_s - ttft_s[number]) / ttft_s[number]
            for number, one_s in self._expected_s.items()
            if number >= LEARNT and ttft_s[number] > 0.0
        ]
        error = median(errors) if errors else None
        return Outcome(
            ttft_s, self._gaps_s(), self._tokens, self._cached_tokens, self._compute_s, error
        )

    def _gaps_s(self) -> Sequence[float]:
        first_s = [at_s + one_s for at_s, one_s in zip(self._arrivals_s, self._ttft_s, strict=True)]
        return gaps_s(self._requests, first_s, self._cluster.decoding, self._cluster.seed)

    def keeps(self, limits: Limits, missed_max: int) -> bool:
        """Whether no more than so many requests miss a limit. Ends as soon as too many first tokens
        do: queues that grow without end take long to simulate."""
        missed = first = 0
        for now_s in self._events():
            while first < len(self._ttft_s) and self._arrivals_s[first] + limits.first_s < now_s:
                missed += self._ttft_s[first] > limits.first_s
                first += 1
            if missed > missed_max:
                return False
        each = zip(self._ttft_s, self._gaps_s(), strict=True)
        return sum(a > limits.first_s or b > limits.gap_s for a, b in each) <= missed_max

    def _events(self) -> Iterator[float]:
        """A prompt arrives, or was computed; the times of both, in their order."""
        for number, arrival_s in enumerate(self._arrivals_s):
            while self._ends and self._ends[0][0] <= arrival_s:
                yield self._end(*heapq.heappop(self._ends))
            self._arrive(number, arrival_s)
            yield arrival_s
        while self._ends:
            yield self._end(*heapq.heappop(self._ends))

    def _arrive(self, number: int, now_s: float) -> None:
        chosen = self._routing.choose(number, self._requests[number], now_s)
        if chosen is None:
            return
        place = chosen.place
        if chosen.first_s is not None:
            self._expected_s[number] = chosen.first_s
        self._tokens += self._requests[number].input_length
        self._instances[place].queue.append(number)
        if not self._instances[place].is_busy:
            self._begin(place, now_s)

    def _begin(self, place: int, now_s: float) -> None:
        """The instance has nothing else to do than the first prompt of its queue."""
        instance = self._instances[place]
        number = instance.queue.popleft()
        instance.is_busy = True
        cached, remote = self._memory.found(self._requests[number], place)
        start_s = now_s
        if remote:
            begun_s = max(self._arrivals_s[number], instance.network_free_s)
            instance.network_free_s = begun_s + self._rates.load_s(remote)
            start_s = max(now_s, instance.network_free_s)
        compute_s = self._rates.compute_s(self._requests[number].input_length, cached)
        compute_s *= self._luck[number]
        self._cached_tokens += cached
        self._compute_s += compute_s
        heapq.heappush(self._ends, (start_s + compute_s, number, place, cached))

    def _end(self, now_s: float, number: int, place: int, cached: int) -> float:
        request = self._requests[number]
        self._ttft_s[number] = now_s - self._arrivals_s[number]
        self._routing.ended(number, now_s, cached)
        self._memory.keep(request.hash_ids, place)
        instance = self._instances[place]
        instance.is_busy = False
        if instance.queue:
            self._begin(place, now_s)
        return now_s


def simulate(requests: Sequence[Request], cluster: Cluster, factor: float = 1.0) -> Outcome:
    """Replays a trace, empty caches first. ``factor``: by how much faster than it was recorded.
    ``ValueError`` if there are no requests, or they are not in the order of their times."""
    return _simulation(requests, cluster, factor).run()


def capacity(requests: Sequence[Request], cluster: Cluster, limits: Limits) -> float:
    """The highest arrival rate, in times the trace's, at which ``IN_TIME`` of the requests keep the
    limits; 0.0 or infinity if it lies outside of what is looked at. One that is refused keeps
    none."""
    missed_max = len(requests) - min(int(IN_TIME * len(requests)) + 1, len(requests))

    def holds(factor: float) -> bool:
        return _simulation(requests, cluster, factor).keeps(limits, missed_max)

    grows = holds(1.0)
    edge, step = 1.0, 2.0 if grows else 0.5
    while holds(edge * step) == grows:
        edge *= step
        if not FACTOR_MIN < edge < FACTOR_MAX:
            return math.inf if grows else 0.0
    low, high = sorted((edge, edge * step))
    while high / low > FACTOR_STEP:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _simulation(requests: Sequence[Request], cluster: Cluster, factor: float) -> _Simulation:
    if not requests:
        raise ValueError("there are no requests to replay")
    if any(after.timestamp < before.timestamp for before, after in pairwise(requests)):
        raise ValueError("the requests of the trace are not in the order of their timestamps")
    return _Simulation(requests, cluster, factor)
