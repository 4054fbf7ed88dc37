# SPDX-License-Identifier: Apache-2.0
"""What the router tells a monitoring system. Pure.

Servers are named by their URLs, so whoever may read the metrics learns which servers there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from bootstrap_server.prometheus_text import family
from sglang_mooncake.router.cache_view import CacheView
from sglang_mooncake.router.decode_servers import DecodeServers
from sglang_mooncake.router.decode_view import DECODE_REASONS
from sglang_mooncake.router.gate import Gate
from sglang_mooncake.router.kv_events import STATES, EventStream
from sglang_mooncake.router.placement import REASONS, PrefillView
from sglang_mooncake.router.registry_source import Registry
from sglang_mooncake.router.servers import ROLES, Server, Servers

if TYPE_CHECKING:  # The store takes time to import, and not every router has one.
    from sglang_mooncake.router.store_source import StoreSource

__all__ = ["ENDS", "METRICS", "PREFIX", "Counts", "Known", "Metric", "text"]

PREFIX: Final = "sglang_mooncake_router_"
#: How a client's request can end.
ENDS: Final = ("answered", "bad request", "client left", "failed", "refused", "stopped")


class Metric(NamedTuple):
    """One row. ``name`` is without the prefix."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


_OF_SERVER: Final = ("role", "server")
METRICS: Final = (
    Metric("requests_total", "counter", ("end",), "Clients' requests that have ended, by how."),
    Metric("requests", "gauge", (), "Clients' requests that are under way, or wait for that."),
    Metric(
        "waiting_requests",
        "gauge",
        (),
        "Clients' requests that wait for their turn; there is no row of this and of the next two "
        "without --max-concurrent-requests.",
    ),
    Metric("waited_total", "counter", (), "Requests that waited for their turn and got it."),
    Metric("waited_seconds_total", "counter", (), "How long these waited in all."),
    Metric(
        "attempts_failed_total",
        "counter",
        ("role", "kind"),
        "Attempts that failed before the client was told anything, by the server that failed and "
        "how: unreachable, exhausted (this router had no descriptor left to connect to it), stale "
        "(it closed a connection that had been idle as it was used again), broken, late, or "
        "answered with an error.",
    ),
    Metric("retries_total", "counter", (), "Requests that were tried a second time."),
    Metric(
        "first_seconds_total",
        "counter",
        (),
        "Time from when servers are asked to the first bytes of an answer.",
    ),
    Metric("first_total", "counter", (), "Requests whose answer has begun."),
    Metric(
        "choices_total",
        "counter",
        ("reason",),
        "Choices of a prefill server by caches and queues, by reason: its cache has more of the "
        "prompt than others' (cache), another's has more and the wait there would be longer "
        "(queue), the caches have the same (load), there was no other (only).",
    ),
    Metric(
        "decode_choices_total",
        "counter",
        ("reason",),
        "Choices of a decode server by what it has to do, by reason: others with fewer requests "
        "have no memory for the prompt (memory), its cache has more of it than others' (cache), it "
        "has as few requests as any (load), there was no other (only).",
    ),
    Metric(
        "decode_free_tokens",
        "gauge",
        _OF_SERVER,
        "KV memory that a decode server has left, in tokens; there is no row while it does not "
        "tell.",
    ),
    Metric("servers", "gauge", ("role", "health"), "Servers that are well, and that are ill."),
    Metric("server_requests", "gauge", _OF_SERVER, "Requests that a server has been sent."),
    Metric("server_chosen_total", "counter", _OF_SERVER, "Requests that a server was chosen for."),
    Metric(
        "server_failures_total", "counter", _OF_SERVER, "Failures of a server that the router saw."
    ),
    Metric("server_ill_total", "counter", _OF_SERVER, "How often a server became ill."),
    Metric(
        "prompt_tokens_total",
        "counter",
        _OF_SERVER,
        "Tokens of the prompts that a prefill server has told of.",
    ),
    Metric(
        "cached_tokens_total",
        "counter",
        _OF_SERVER,
        "Those of them that the prefill server had in a cache.",
    ),
    Metric(
        "stream_gaps_total",
        "counter",
        _OF_SERVER,
        "Times between events of the streams of a decode server, which have a token each mostly.",
    ),
    Metric("stream_gap_seconds_total", "counter", _OF_SERVER, "How long they were in all."),
    Metric(
        "expected_cached_tokens_total",
        "counter",
        _OF_SERVER,
        "Tokens that a prefill server was expected to have in its cache, of prompts of which it "
        "has told what it had.",
    ),
    Metric(
        "prefixes_missed_total",
        "counter",
        _OF_SERVER,
        "Prompts of which a prefill server had less in its cache than the router expected.",
    ),
    Metric(
        "prefill_expected_seconds_total",
        "counter",
        _OF_SERVER,
        "Time from sending prompts to a prefill server to the end of its answers, as expected.",
    ),
    Metric(
        "prefill_seconds_total",
        "counter",
        _OF_SERVER,
        "The same as it was measured.",
    ),
    Metric(
        "event_streams",
        "gauge",
        ("state",),
        "Servers, or their DP ranks, whose KV events are followed: live, waiting for the "
        "first or for missed ones, silent although a prompt was computed, or never hits: they name "
        "nothing of what the server finds in its cache.",
    ),
    Metric("event_batches_total", "counter", _OF_SERVER, "Batches of KV events."),
    Metric("event_gaps_total", "counter", _OF_SERVER, "Times at which batches were missing."),
    Metric(
        "event_losses_total",
        "counter",
        _OF_SERVER,
        "Times at which missing batches could not be had again, or could not be read.",
    ),
    Metric(
        "store_age_seconds",
        "gauge",
        (),
        "Time since an owner of the store has answered; there is no row before the first time, and "
        "without --store.",
    ),
    Metric("store_objects", "gauge", (), "Objects of the store that the router knows of."),
    Metric(
        "store_is_live",
        "gauge",
        (),
        "1 while owners of the store answer and prompts are found in it, 0 if not.",
    ),
    Metric(
        "store_expected_tokens_total",
        "counter",
        _OF_SERVER,
        "Tokens that a prefill server was expected to load from the store.",
    ),
    Metric(
        "store_tokens_total",
        "counter",
        _OF_SERVER,
        "Tokens that a prefill server had beyond its cache, of those that the store has.",
    ),
    Metric(
        "registry_age_seconds",
        "gauge",
        ("registry",),
        "Time since a registry has told which servers there are; there is no row before the first "
        "time.",
    ),
    Metric("registry_servers", "gauge", ("registry",), "Servers that a registry has listed last."),
    Metric("event_pages", "gauge", _OF_SERVER, "Pages that a server's cache has by its events."),
)


class Counts:
    """What has been counted since the start. The event loop's thread alone uses it."""

    def __init__(self) -> None:
        self.under_way = 0
        self.ended: Counter[str] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()
        self.retries = 0
        self.choices: Counter[str] = Counter()
        self.decode_choices: Counter[str] = Counter()
        self.first_s = 0.0
        self.firsts = 0


class Known(NamedTuple):
    """All that the router knows: the servers, its views of them, and who else tells."""

    servers: Servers
    views: Mapping[Server, Sequence[PrefillView]]
    decode: DecodeServers
    gate: Gate | None = None
    registries: Sequence[Registry] = ()
    pool: StoreSource | None = None


def text(counts: Counts, known: Known, kinds: Iterable[str], now_s: float) -> Iterator[str]:
    """The lines of ``GET /metrics``. ``kinds``: how attempts can fail."""
    kinds, (servers, views, decode, gate, registries, pool) = tuple(kinds), known
    age_s = None if pool is None else pool.age_s(now_s)
    caches: dict[Server, Sequence[CacheView]] = {
        **views,
        **{server: (view,) for server, view in decode.views.items()},
    }
    streams = {
        (server.role, server.url): [view.events for view in ranks if view.events is not None]
        for server, ranks in caches.items()
        if any(view.events is not None for view in ranks)
    }
    states = Counter(stream.state(now_s) for ranks in streams.values() for stream in ranks)

    def of_views(figure: Callable[[PrefillView], float]) -> Mapping[tuple[str, ...], float]:
        return {(s.role, s.url): sum(map(figure, ranks)) for s, ranks in views.items()}

    def of_streams(figure: Callable[[EventStream], float]) -> Mapping[tuple[str, ...], float]:
        return {key: sum(map(figure, ranks)) for key, ranks in streams.items()}

    health: dict[tuple[str, ...], float] = {
        (role, word): float(sum(one.is_well == is_well for one in servers.of(role)))
        for role in ROLES
        for word, is_well in (("well", True), ("ill", False))
    }
    failures: dict[tuple[str, ...], float] = {
        (role, kind): counts.failed[role, kind] for role in ROLES for kind in kinds
    }
    values: dict[str, Mapping[tuple[str, ...], float]] = {
        "requests_total": {(end,): counts.ended[end] for end in ENDS},
        "requests": {(): counts.under_way},
        "waiting_requests": {} if gate is None else {(): gate.waiting},
        "waited_total": {} if gate is None else {(): gate.waited},
        "waited_seconds_total": {} if gate is None else {(): gate.waited_s},
        "attempts_failed_total": failures,
        "retries_total": {(): counts.retries},
        "first_seconds_total": {(): counts.first_s},
        "first_total": {(): counts.firsts},
        "servers": health,
        "server_requests": {(s.role, s.url): s.under_way for s in servers.all()},
        "server_chosen_total": {(s.role, s.url): s.counts.chosen for s in servers.all()},
        "server_failures_total": {(s.role, s.url): s.counts.failed for s in servers.all()},
        "server_ill_total": {(s.role, s.url): s.counts.ills for s in servers.all()},
        "prompt_tokens_total": {
            (s.role, s.url): s.counts.prompt_tokens for s in servers.of("prefill")
        },
        "cached_tokens_total": {
            (s.role, s.url): s.counts.cached_tokens for s in servers.of("prefill")
        },
        "stream_gaps_total": {(s.role, s.url): s.counts.gaps for s in servers.of("decode")},
        "stream_gap_seconds_total": {
            (s.role, s.url): s.counts.gaps_s for s in servers.of("decode")
        },
        "choices_total": {(reason,): counts.choices[reason] for reason in REASONS},
        "decode_choices_total": {(one,): counts.decode_choices[one] for one in DECODE_REASONS},
        "decode_free_tokens": {
            (server.role, server.url): free
            for server, view in decode.views.items()
            if (free := view.free_tokens(now_s)) is not None
        },
        "expected_cached_tokens_total": of_views(lambda view: view.counts.expected_hits),
        "prefixes_missed_total": of_views(lambda view: view.counts.missed),
        "prefill_expected_seconds_total": of_views(lambda view: view.counts.expected_s),
        "prefill_seconds_total": of_views(lambda view: view.counts.measured_s),
        "event_streams": {(state,): states[state] for state in STATES},
        "event_batches_total": of_streams(lambda stream: stream.batches),
        "event_gaps_total": of_streams(lambda stream: stream.gaps),
        "event_losses_total": of_streams(lambda stream: stream.losses),
        "store_age_seconds": {} if age_s is None else {(): age_s},
        "store_objects": {} if pool is None else {(): pool.objects},
        "store_is_live": {} if pool is None else {(): int(pool.state == "live")},
        "store_expected_tokens_total": of_views(lambda view: view.counts.expected_loads),
        "store_tokens_total": of_views(lambda view: view.counts.loads),
        "registry_age_seconds": {
            (one.address,): age_s for one in registries if (age_s := one.age_s(now_s)) is not None
        },
        "registry_servers": {(one.address,): one.servers for one in registries},
        "event_pages": of_streams(len),
    }
    for metric in METRICS:
        yield from family(
            PREFIX + metric.name, metric.kind, metric.help, metric.labels, values[metric.name]
        )
