# SPDX-License-Identifier: Apache-2.0
"""Which decode server a request goes to: one whose KV memory has room for the prompt, and which has
few requests, of which the part of the prompt that its cache has counts as much as one. Pure: the
time and chance are handed in."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Final, NamedTuple, TypeAlias

from sglang_mooncake.router.cache_view import CacheView, Named
from sglang_mooncake.router.choice import any_of
from sglang_mooncake.router.fit import Kin, WorkFit
from sglang_mooncake.router.servers import Server

__all__ = [
    "DECODE_REASONS",
    "LOAD_AGE_MAX_S",
    "DecodeFigures",
    "DecodeView",
    "Load",
    "Sent",
    "best_decode",
    "decode_reason",
]

#: What a server told of its load is used for so long.
LOAD_AGE_MAX_S: Final = 5.0
#: Why a decode server was chosen: it was the only one; others with fewer requests have no memory
#: for the prompt; its cache has more of the prompt than others'; it has as few requests as any.
DECODE_REASONS: Final = ("only", "memory", "cache", "load")


class Load(NamedTuple):
    """What a server tells of itself, or of one of its DP ranks."""

    #: Those that run, and those that wait.
    requests: int
    #: KV memory in tokens: what is taken, also by requests that wait for it, and all of it.
    used_tokens: int
    all_tokens: int


_NO_LOAD: Final = Load(0, 0, 0)
Sent: TypeAlias = Mapping[int | None, float]
"""Tokens of prompts by the DP rank that they were sent to; None: the server chooses the rank."""


class DecodeFigures(NamedTuple):
    """What is known of a decode server for one prompt."""

    requests: int
    #: Infinite while the server has not told.
    free_tokens: float = math.inf
    #: Tokens of the prompt that its cache has.
    hit_tokens: float = 0.0

    def missing(self, tokens: float) -> float:
        """What has to be handed over of a prompt of so many tokens."""
        return max(0.0, tokens - self.hit_tokens)

    def fits(self, tokens: float) -> bool:
        """Whether there is memory for the prompt."""
        return self.missing(tokens) <= self.free_tokens


def best_decode(tokens: float, candidates: Sequence[DecodeFigures], random: Random) -> int:
    """The index of the one for a prompt of so many tokens: of those that have memory for it the one
    with the least requests and part of the prompt to be handed over, which counts as one request at
    most. Where that is equal the one with the most memory, and of these any. Where no server has
    memory the one that lacks the least."""
    fitting = [at for at, one in enumerate(candidates) if one.fits(tokens)]

    def cost(at: int) -> tuple[float, float]:
        one = candidates[at]
        left = one.free_tokens - one.missing(tokens)
        part = one.missing(tokens) / tokens if tokens else 0.0
        return (one.requests + part, -left) if fitting else (-left, one.requests + part)

    costs = {at: cost(at) for at in fitting or range(len(candidates))}
    least = min(costs.values())
    return any_of([at for at, one in costs.items() if one == least], random)


def decode_reason(tokens: float, candidates: Sequence[DecodeFigures], at: int) -> str:
    """Why that one is the best: one of ``DECODE_REASONS``."""
    if len(candidates) == 1:
        return "only"
    chosen = candidates[at]
    if any(one.requests < chosen.requests and not one.fits(tokens) for one in candidates):
        return "memory"
    return "cache" if chosen.hit_tokens > min(one.hit_tokens for one in candidates) else "load"


class DecodeView(CacheView):
    """What the router knows of one decode server: its requests, its memory, its cache, and how far
    apart its tokens come."""

    def __init__(self, server: Server, kin: Kin | None = None) -> None:
        """``kin``: of all servers."""
        super().__init__(server)
        self.server: Final = server
        #: By the requests that it has.
        self.pace = WorkFit(kin)
        #: What it told last, by DP rank, and in sum.
        self._loads: Mapping[int, Load] = {}
        self._load = _sum(())
        self._told_s = -math.inf
        #: Requests of others than this router, when the server told.
        self._others = 0
        #: What it was sent in all, and what it had been when it was asked.
        self._sent: defaultdict[int | None, float] = defaultdict(float)
        self._sent_before: Sent = {}

    @property
    def sent(self) -> Sent:
        """In all, to be handed to ``told``: the server may not know yet of what is sent later."""
        return dict(self._sent)

    def told(self, loads: Mapping[int, Load], sent_before: Sent, now_s: float) -> None:
        """The server tells of its load, by DP rank. It had been sent so much when it was asked."""
        self._loads, self._told_s, self._sent_before = loads, now_s, sent_before
        self._load = _sum(loads.values())
        self._others = max(0, self._load.requests - self.server.under_way)

    def load(self, now_s: float) -> Load | None:
        """What it told last, in sum over its DP ranks; None if that was long ago."""
        return self._load if self._is_told(now_s) else None

    def free_tokens(self, now_s: float, rank: int | None = None) -> float | None:
        """Memory that is left beside what was sent since it told; None while it is not known. Of a
        DP rank that it has told of, else of all together: which one gets a prompt it chooses
        itself."""
        if not self._is_told(now_s):
            return None
        since = {one: sent - self._sent_before.get(one, 0.0) for one, sent in self._sent.items()}
        if rank is None or rank not in self._loads:
            load, sent = self._load, sum(since.values())
        else:  # It gets its part of what the server has placed itself.
            load = self._loads[rank]
            sent = since.get(rank, 0.0) + since.get(None, 0.0) / len(self._loads)
        return max(0.0, load.all_tokens - load.used_tokens - sent) if load.all_tokens > 0 else None

    def _is_told(self, now_s: float) -> bool:
        return now_s - self._told_s <= LOAD_AGE_MAX_S

    def requests(self, now_s: float) -> int:
        """This router's, and those of others that it told of."""
        others = self._others if self._is_told(now_s) else 0
        return self.server.under_way + others

    def figures(self, look: Named | None, now_s: float, rank: int | None = None) -> DecodeFigures:
        """For one prompt, or for one of which nothing is known. ``rank``: the DP rank that the
        client has named."""
        free = self.free_tokens(now_s, rank)
        hits = None if look is None else self.told_tokens(look, now_s)
        return DecodeFigures(
            self.requests(now_s), math.inf if free is None else free, 0.0 if hits is None else hits
        )

    def send(self, tokens: float, rank: int | None = None) -> None:
        """The server is sent a prompt of which so many tokens are to be handed over. ``rank``: as
        for ``figures``."""
        self._sent[rank if rank in self._loads else None] += tokens

    def answered(self, look: Named, handed_over: float, sent_s: float, now_s: float) -> None:
        """A prompt is served, of which so many tokens were handed over: an event of a whole page
        has come, or must come soon."""
        if self._events is None or look.event_names(self._event_page) is None:
            return
        if handed_over >= self._event_page:
            self._events.expect(sent_s, now_s)


def _sum(loads: Iterable[Load]) -> Load:
    """Of all DP ranks."""
    return Load(*map(sum, zip(_NO_LOAD, *loads, strict=True)))
