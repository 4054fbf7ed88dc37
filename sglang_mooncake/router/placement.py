# SPDX-License-Identifier: Apache-2.0
"""Which prefill server computes a prompt: the one that is expected to have its first token first.
Pure: the time and chance are handed in.

The expectation is what the server has still to compute before, and what it has to compute of this
prompt, where its cache does not have it. How long that takes is fitted from what it took before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from random import Random
from statistics import median
from typing import Final, NamedTuple, Protocol

import msgspec

from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.choice import any_of
from sglang_mooncake.router.fit import Kin, LoadFit, Times, WorkFit, work_of
from sglang_mooncake.router.known import KnownPages, first_of
from sglang_mooncake.router.kv_events import NEVER
from sglang_mooncake.router.pages import named_pages, names_of, token_digests
from sglang_mooncake.router.prefill_queue import Batch, Batches, Queue, Spent
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import Told
from sglang_mooncake.router.sharing import Host

__all__ = [
    "REASONS",
    "Choice",
    "Expected",
    "Figures",
    "Look",
    "Placed",
    "Pool",
    "PrefillView",
    "Ranks",
    "best",
    "expect",
    "late_s",
    "place",
]

#: Expectations that differ by less count as equal: they are not as exact.
TIE: Final = 0.02
#: What computing a prompt costs those behind it, in times what it takes, where all servers are
#: busy: a place that computes less of it may be expected later.
WORK_WEIGHT: Final = 1.0
#: Of so many last requests the errors of the expectation are kept, once the router has learnt from
#: so many of all servers: before, they say how far its first figures are off.
ERRORS_KEPT: Final = 256
LEARNT: Final = 100
#: Once it has learnt from so many, what a prompt took longer tells of the host, and not of first
#: figures.
SOUND: Final = 16
#: Some tens of MB for each server.
PAGES_MAX: Final = 1 << 18
#: Why a server was chosen: it was the only one; its cache has more of the prompt than others'; that
#: of another has more, and the wait there would be longer; the caches have the same.
REASONS: Final = ("only", "cache", "queue", "load")


class Ranks(NamedTuple):
    """The DP ranks of the prefill and the decode server that a prompt is to go to; None: any."""

    prefill: int | None = None
    decode: int | None = None


ANY_RANKS: Final = Ranks()


class Look:
    """A prompt as its caches are looked up."""

    def __init__(
        self,
        names: Sequence[int],
        page_tokens: float,
        tokens: float,
        *,
        text_bytes: int = 0,
        prompt: Sequence[int] | None = None,
        seed: bytes = b"",
        cached_max: int | None = None,
        ranks: Ranks = ANY_RANKS,
    ) -> None:
        """``names`` are those of pages that stand for ``page_tokens`` tokens each; there are
        ``tokens`` in all, as far as it is known. ``text_bytes``: length of a prompt that is text.
        ``prompt``: the tokens of one that servers' events name, whose first name follows from
        ``seed``. ``cached_max``: so many tokens may come out of a cache; None is all, but for the
        last one, which is computed always. ``ranks``: those that the client has named."""
        self.names, self.page_tokens, self.tokens = names, page_tokens, tokens
        self.cached_max = max(
            0.0, tokens - 1 if cached_max is None else min(cached_max, tokens - 1)
        )
        self.is_limited, self.ranks = cached_max is not None, ranks
        self.text_bytes = text_bytes
        self._prompt, self._seed = prompt, seed
        self._digests: dict[int, list[bytes]] = {}
        self._events: dict[int, list[int]] = {}
        self._stored: dict[int, float] = {}

    def unnamed(self, page_size: int) -> int:
        """How many digests ``digests`` has still to make."""
        if self._prompt is None or page_size in self._digests:
            return 0
        return named_pages(len(self._prompt), page_size)

    def digests(self, page_size: int) -> Sequence[bytes] | None:
        """Of its pages as servers with such pages name them; None if they cannot be known."""
        if self._prompt is None:
            return None
        if page_size not in self._digests:
            self._digests[page_size] = token_digests(self._prompt, page_size, self._seed)
        return self._digests[page_size]

    def event_names(self, page_size: int) -> Sequence[int] | None:
        """The names of its pages in the events of a server with such pages; None if they cannot be
        known."""
        if page_size not in self._events:
            digests = self.digests(page_size)
            if digests is None:
                return None
            self._events[page_size] = names_of(digests)
        return self._events[page_size]

    def stored_tokens(self, pool: Pool, page_size: int) -> float:
        """How many tokens of its beginning the pool has; it is asked once."""
        if page_size not in self._stored:
            digests = self.digests(page_size)
            pages = pool.first_of(digests) if digests else 0
            self._stored[page_size] = pages * page_size
        return self._stored[page_size]


class Pool(Protocol):
    """A store that prefill servers load pages from."""

    def first_of(self, digests: Sequence[bytes]) -> int:
        """How many of these pages, from the first on, it has without a gap."""

    def told(self, expected: float, found: float) -> None:
        """A server was expected to load so many tokens, and has loaded so many."""


class Figures(NamedTuple):
    """What is known of a server for one prompt."""

    #: What is left of the work that it has been sent before.
    queue_s: float
    #: What the prompt takes.
    times: Times
    #: Tokens of the prompt that its cache has.
    hit_tokens: float
    #: Prompts that it has been sent and that have not ended.
    under_way: int
    #: Tokens behind those that it can load from a store, and what each takes.
    load_tokens: float = 0.0
    load_token_s: float = 0.0
    #: How many times as long all of this takes as it would if no other server were at work.
    slowdown: float = 1.0


class Expected(NamedTuple):
    """When the prompt's first token is expected, of that what the prompt itself takes, and how many
    tokens are loaded for it."""

    first_s: float
    work_s: float
    load_tokens: float = 0.0


def expect(tokens: float, figures: Figures) -> Expected:
    """For a prompt of so many tokens. What would take longer to load is computed."""
    missing = max(0.0, tokens - figures.hit_tokens)
    is_worth_it = figures.load_token_s < figures.times.token_s
    loaded = min(figures.load_tokens, missing) if is_worth_it else 0.0
    hits = tokens - missing + loaded
    work_s = figures.times.work_s(work_of(tokens, hits)) + loaded * figures.load_token_s
    return Expected(figures.queue_s + work_s, work_s, loaded)


def late_s(tokens: float, figures: Figures, limit_s: float | None) -> float:
    """How long after the limit the first token is expected, because of prompts before it; 0 if it
    is not. A prompt that is late by itself is not counted as such: else a server that was once
    taken for slow would be asked no more, and never be seen to be faster."""
    if limit_s is None or figures.queue_s == 0.0:
        return 0.0
    return max(0.0, expect(tokens, figures).first_s - limit_s)


def best(
    tokens: float, candidates: Sequence[Figures], random: Random, limit_s: float | None = None
) -> int:
    """The index of the one with the earliest first token, where what is computed counts the more
    (``WORK_WEIGHT``) the more servers are busy; of those that are as early the one with the fewest
    requests under way, and of these any. One that is late (``late_s``) is chosen where all are."""
    expected = [expect(tokens, one) for one in candidates]
    weight = WORK_WEIGHT * sum(one.under_way > 0 for one in candidates) / len(candidates)
    costs = [one.first_s + weight * one.work_s for one in expected]
    every = range(len(candidates))
    in_time = [at for at in every if not late_s(tokens, candidates[at], limit_s)] or [*every]
    limit = min(costs[at] for at in in_time) * (1 + TIE)
    ties = [at for at in in_time if costs[at] <= limit]
    fewest = min(candidates[at].under_way for at in ties)
    return any_of([at for at in ties if candidates[at].under_way == fewest], random)


class Placed:
    """A prompt that a server has been sent."""

    __slots__ = (
        "alone_s",
        "expected",
        "fixed_s",
        "hit_tokens",
        "host_s",
        "is_begun",
        "load_tokens",
        "look",
        "remembered",
        "sent_s",
        "view",
    )

    def __init__(
        self,
        view: PrefillView,
        look: Look,
        figures: Figures,
        sent_s: float,
    ) -> None:
        self.view, self.look, self.sent_s = view, look, sent_s
        self.expected = expect(look.tokens, figures)
        self.alone_s = self.expected.work_s / figures.slowdown
        self.fixed_s = figures.times.fixed_s / figures.slowdown
        self.host_s = 0.0
        self.hit_tokens, self.load_tokens = figures.hit_tokens, figures.load_tokens
        self.is_begun, self.remembered = view.is_begun(look), view.remembered(look)


class ViewCounts(msgspec.Struct):
    """Of prompts whose prefill has ended, and of which the server has told."""

    #: Times from the request to the end of the prefill.
    expected_s: float = 0.0
    measured_s: float = 0.0
    #: Tokens that its cache was expected to have.
    expected_hits: float = 0.0
    #: Prompts of which its cache had a page less than expected, or even less.
    missed: int = 0
    #: Tokens that it was expected to load from the store, and that it had beyond its cache then.
    expected_loads: float = 0.0
    loads: float = 0.0


class PrefillView(CacheView):
    """What the router knows of one prefill server, or of one of its DP ranks: its cache, its queue,
    its speed. ``ended`` is called once for each ``send``."""

    def __init__(
        self,
        server: Server,
        pool: Pool | None = None,
        kin: Kin | None = None,
        *,
        host: Host | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """``pool``: a store that the server loads from; ``kin``: of all servers; ``host``: its own.
        ``rank``: which of the server's ``ranks`` it is."""
        super().__init__(server, rank, ranks)
        self.server: Final = server
        self.counts = ViewCounts()
        self.fit, self.load_fit = WorkFit(kin), LoadFit()
        self._pool = pool
        self._sent = KnownPages(PAGES_MAX)
        #: Prompts of which it had nothing in its cache, though some of it was sent before, one
        #: after another.
        self._unfound = 0
        #: By name, how many prompts of the queue have the page.
        self._queued: Counter[int] = Counter()
        self._ills = server.counts.ills
        self._host = Host() if host is None else host
        self._queue, self._batches = Queue(self._host), Batches()
        self._errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def figures(self, look: Look, now_s: float) -> Figures:
        """For one prompt."""
        self._forget_former()
        hit_tokens = min(look.cached_max, self._hit_tokens(look, now_s))
        self._learn_batch(self._batches.take(now_s))
        times, slowdown = self.fit.times, self._host.slowdown(self._queue.others)
        loads, load_s = 0.0, 0.0
        if self._pool is not None and self.page_size:
            stored = min(look.cached_max, look.stored_tokens(self._pool, self.page_size))
            loads = max(0.0, stored - hit_tokens)
            load_s = self.load_fit.token_s(times.token_s)
        return Figures(
            self._queue.left_s(now_s, slowdown),
            times.slowed(slowdown),
            hit_tokens,
            len(self._queue),
            loads,
            load_s * slowdown,
            slowdown,
        )

    def _hit_tokens(self, look: Look, now_s: float) -> float:
        """By the server's events while they come; else by what it was sent, and by both where not
        all that it told of is known."""
        stored = self.told_tokens(look, now_s)
        if stored is None:
            return 0.0 if self.is_vain else self.remembered(look)
        if self._events is not None and self._events.left_out > 0:
            return max(stored, self.remembered(look))
        return max(stored, first_of(self._queued, look.names) * look.page_tokens)

    def remembered(self, look: Look) -> float:
        """How many tokens of its beginning the server was sent before."""
        return self._sent.first_of(look.names) * look.page_tokens

    @property
    def is_vain(self) -> bool:
        """Whether it has nothing in its cache of what it was sent before."""
        return self._unfound >= NEVER

    def queue_s(self, now_s: float) -> float:
        """What is left of the work that it has been sent."""
        return self._queue.left_s(now_s, self._host.slowdown(self._queue.others))

    def send(self, look: Look, figures: Figures, now_s: float) -> Placed:
        """The server is sent the prompt."""
        placed = Placed(self, look, figures, now_s)
        self._queue.send(placed, now_s)
        self._queued.update(look.names)
        self._sent.add(look.names)
        return placed

    def ended(self, placed: Placed, now_s: float, told: Told | None) -> None:
        """Its prefill has ended; ``told`` by the server, None if it has failed."""
        spent = self._queue.end(placed, now_s)
        queued = self._queued
        for name in placed.look.names:
            left = queued[name] - 1
            if left:
                queued[name] = left
            else:
                dict.__delitem__(queued, name)  # Counter's own looks whether the name is there.
        if told is not None:
            self._learn(placed, told, now_s, spent)

    def _learn(self, placed: Placed, told: Told, now_s: float, spent: Spent) -> None:
        took_s = now_s - placed.sent_s
        self.counts.expected_s += placed.expected.first_s
        self.counts.measured_s += took_s
        if took_s > 0.0 and self.fit.learnt >= LEARNT:
            self._errors.append(abs(placed.expected.first_s - took_s) / took_s)
        self.fit.counted()
        tokens, hits = placed.look.tokens, placed.hit_tokens
        if told.prompt_tokens is not None:
            tokens = told.prompt_tokens
        if told.cached_tokens is not None:
            self._compare(placed, told.cached_tokens, told.count)
            if self._events is not None and self._is_news(placed.look, told, int(tokens)):
                page = self._first_computed(placed, told)
                self._events.expect(placed.sent_s, now_s, page)
            self.counts.expected_hits += hits
            # The page of the last token is computed, too.
            self.counts.missed += told.cached_tokens < hits - placed.look.page_tokens
            loaded = self._loaded(placed, told.cached_tokens)
            hits = told.cached_tokens
            if loaded:
                alone_s = spent.own_s / self._host.slowdown(spent.others)
                rest_s = alone_s - self.fit.work_s(work_of(tokens, hits))
                self.load_fit.learn(loaded, rest_s)
                return
        self._learn_batch(self._batches.add(work_of(tokens, hits), spent, now_s))

    def _learn_batch(self, batch: Batch | None) -> None:
        """From prompts that were computed together."""
        if batch is None:
            return
        others, own_s = batch.spent.others, batch.spent.own_s
        alone_s = own_s / self._host.slowdown(others)
        if self.fit.learnt >= SOUND:
            self._host.learn(others, own_s, self.fit.work_s(batch.work))
        self.fit.learn(batch.work, alone_s)

    def _compare(self, placed: Placed, cached_tokens: int, count: int) -> None:
        """Whether the cache had what was sent there before, and events have named what it had. What
        came out of the store, or is of another prompt of a batch, says nothing of either."""
        if count > 1 or (placed.load_tokens and not placed.is_begun):
            return
        if cached_tokens:
            self._unfound = 0
        elif placed.remembered > self.page_size and not placed.look.is_limited:
            self._unfound += 1
        is_known = placed.is_begun
        if self._events is None or is_known is None:
            return
        if is_known or cached_tokens >= self._event_page:
            self._events.found(is_known)

    def _loaded(self, placed: Placed, cached_tokens: int) -> float:
        """How many of the cached tokens have come out of the store."""
        if self._pool is None or not placed.load_tokens:
            return 0.0
        loaded = min(placed.load_tokens, max(0.0, cached_tokens - placed.hit_tokens))
        self.counts.expected_loads += placed.expected.load_tokens
        self.counts.loads += loaded
        self._pool.told(placed.expected.load_tokens, loaded)
        return loaded

    def _is_news(self, look: Look, told: Told, tokens: int) -> bool:
        """Whether pages were computed for certain that the cache did not have. The last token is
        computed always, and so is its page; what may not come out of the cache may be there, too.
        Of several prompts one at least has computed a page more than that if all of them together
        have computed so many."""
        computed = tokens - told.count - (told.cached_tokens or 0)
        return not look.is_limited and computed >= self._event_page * told.count

    def _first_computed(self, placed: Placed, told: Told) -> int | None:
        """The name in events of the first page that the cache did not have; None where that cannot
        be told, or the page was expected there."""
        names, hits = placed.look.event_names(self._event_page), told.cached_tokens or 0
        at = hits // self._event_page
        if not names or told.count > 1 or at >= len(names) or hits < placed.hit_tokens:
            return None
        return names[at]

    def forget(self) -> None:
        """Its cache is empty. Where events come, they tell."""
        self._sent.clear()

    def _forget_former(self) -> None:
        """A server that has been ill may be another process by now."""
        if self.server.counts.ills != self._ills:
            self._ills = self.server.counts.ills
            self.forget()

    @property
    def median_error(self) -> float | None:
        """Of the last expected times to the end of the prefill, as parts of the measured ones. None
        until the router has learnt."""
        return median(self._errors) if self._errors else None


class Choice(NamedTuple):
    """``reason``: one of ``REASONS``; ``late_s``: of the server that is the least late."""

    view: PrefillView
    figures: Figures
    reason: str
    late_s: float


def place(
    look: Look,
    views: Sequence[PrefillView],
    now_s: float,
    random: Random,
    limit_s: float | None = None,
) -> Choice:
    """The server for the prompt, out of one at least. ``limit_s``: for its first token."""
    figures = [view.figures(look, now_s) for view in views]
    at = best(look.tokens, figures, random, limit_s)
    least_s = min(late_s(look.tokens, one, limit_s) for one in figures)
    hits = [one.hit_tokens for one in figures]
    if len(views) == 1:
        reason = "only"
    elif hits[at] < max(hits):
        reason = "queue"
    else:
        reason = "cache" if hits[at] > min(hits) else "load"
    return Choice(views[at], figures[at], reason, least_s)
