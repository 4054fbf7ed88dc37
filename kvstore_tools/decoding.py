# SPDX-License-Identifier: Apache-2.0
"""How far apart the tokens of recorded requests would have come, once their prompts were computed.
Pure.

Each decode instance makes a token for all of its requests in one step, which takes the longer the
more of them and the more KV cache there are. Steps are not simulated one by one: between two
requests that come or go all of them are taken to be equally long. A request goes to the instance
that the router's rule chooses, and waits there for memory where there is none for it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_tools.traces import Request
from sglang_mooncake.router.decode_view import DecodeFigures, best_decode

__all__ = ["Decoding", "gaps_s"]


@dataclass(frozen=True)
class Decoding:
    """Decode instances. The defaults are of a model as Llama 3 70B on 8 A800 with half of their
    memory bandwidth: its weights (140 GB) are read in each step, and the KV cache of all requests
    (327,680 bytes a token); what a request's token computes takes what a prompt's token takes."""

    instances: int = 10
    step_s: float = 17e-3
    request_s: float = 112e-6
    kept_token_s: float = 40e-9
    #: 90 % of the memory, without the weights.
    tokens_each: int = 1_330_000


class _Decoder:
    """One instance. ``steps`` is how many it has made."""

    def __init__(self, rates: Decoding) -> None:
        self._rates = rates
        self._now_s = self._steps = 0.0
        self._tokens = 0.0
        #: By the step of the last token: the request's number.
        self._ends: list[tuple[float, int, float]] = []
        self._waiting: deque[tuple[int, Request]] = deque()

    @property
    def figures(self) -> DecodeFigures:
        """As the instance tells the router."""
        waiting = sum(_kept(one) for _, one in self._waiting)
        free = max(0.0, self._rates.tokens_each - self._tokens - waiting)
        return DecodeFigures(len(self._ends) + len(self._waiting), free)

    def until(self, then_s: float, ended_s: dict[int, float]) -> None:
        """Goes on until then, and tells when requests have ended."""
        while self._ends:
            rates = self._rates
            step_s = (
                rates.step_s + rates.request_s * len(self._ends) + rates.kept_token_s * self._tokens
            )
            end_step, number, kept = self._ends[0]
            end_s = self._now_s + (end_step - self._steps) * step_s
            if end_s > then_s:
                self._steps += (then_s - self._now_s) / step_s
                break
            heapq.heappop(self._ends)
            self._now_s, self._steps = end_s, end_step
            self._tokens -= kept
            ended_s[number] = end_s
            self._admit()
        self._now_s = then_s

    def take(self, number: int, request: Request) -> None:
        """A request whose prompt is computed, at the time of the last ``until``."""
        self._waiting.append((number, request))
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            number, request = self._waiting[0]
            kept = _kept(request)
            if self._ends and self._tokens + kept > self._rates.tokens_each:
                return
            self._waiting.popleft()
            self._tokens += kept
            heapq.heappush(self._ends, (self._steps + _steps(request), number, kept))


def gaps_s(
    requests: Sequence[Request], first_s: Sequence[float], rates: Decoding, seed: int = 0
) -> list[float]:
    """How far apart the tokens of each request come, on average, waiting for memory included.
    ``first_s``: when its first token comes; infinite: it is refused, and so is its gap."""
    decoders = [_Decoder(rates) for _ in range(rates.instances)]
    chance = random.Random(seed)
    ended_s: dict[int, float] = {}
    come = sorted((one_s, number) for number, one_s in enumerate(first_s) if one_s < math.inf)
    for now_s, number in come:
        for one in decoders:
            one.until(now_s, ended_s)
        request = requests[number]
        at = best_decode(request.input_length, [one.figures for one in decoders], chance)
        decoders[at].take(number, request)
    for one in decoders:
        one.until(math.inf, ended_s)
    return [
        (ended_s[number] - one_s) / _steps(requests[number]) if number in ended_s else math.inf
        for number, one_s in enumerate(first_s)
    ]


def _steps(request: Request) -> int:
    """The first token comes with the prompt."""
    return max(1, request.output_length - 1)


def _kept(request: Request) -> float:
    """Tokens whose KV cache is kept, on average: half of the answer is there then."""
    return request.input_length + request.output_length / 2
