# SPDX-License-Identifier: Apache-2.0
"""The servers as the router knows them, for programs and for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bootstrap_server.ranks.router_report import RouterReport, Wells
from sglang_mooncake.router.decode_view import DecodeView
from sglang_mooncake.router.kv_events import EventStream
from sglang_mooncake.router.metrics import Counts, Known
from sglang_mooncake.router.placement import PrefillView
from sglang_mooncake.router.registry_source import Registry
from sglang_mooncake.router.servers import Server

__all__ = ["as_json", "as_text", "report_of"]


def report_of(counts: Counts, known: Known, port: int, release: str) -> RouterReport:
    """For registries' status pages."""
    prefill = known.servers.of("prefill")
    views = [view for ranks in known.views.values() for view in ranks]
    errors = [view.median_error for view in views if view.median_error is not None]
    return RouterReport(
        port=port,
        version=release,
        requests=counts.under_way,
        waiting=0 if known.gate is None else known.gate.waiting,
        answered=counts.ended["answered"],
        refused=counts.ended["refused"],
        failed=counts.ended["failed"] + counts.ended["stopped"],
        prefill=_wells(prefill),
        decode=_wells(known.servers.of("decode")),
        prompt_tokens=sum(one.counts.prompt_tokens for one in prefill),
        cached_tokens=sum(one.counts.cached_tokens for one in prefill),
        expected_cached_tokens=round(sum(view.counts.expected_hits for view in views)),
        error=median(errors) if errors else None,
    )


def _wells(servers: Sequence[Server]) -> Wells:
    return Wells(sum(one.is_well for one in servers), len(servers))


def as_json(counts: Counts, known: Known, now_s: float) -> dict[str, Any]:
    """The answer to ``GET /v1/router``. Times are in seconds."""
    servers, views, decode, gate, registries, pool = known
    return {
        "requests": counts.under_way,
        "waiting": 0 if gate is None else gate.waiting,
        "ended": dict(sorted(counts.ended.items())),
        "retries": counts.retries,
        "choices": dict(sorted(counts.choices.items())),
        "decode_choices": dict(sorted(counts.decode_choices.items())),
        "store": None if pool is None else pool.as_json(),
        "registries": [_registry(one, now_s) for one in registries],
        "servers": {
            "prefill": [
                {**_server(one, now_s), **_views(views[one], now_s)}
                for one in servers.of("prefill")
            ],
            "decode": [
                {**_server(one, now_s), **_decode(decode.views[one], now_s)}
                for one in servers.of("decode")
            ],
        },
    }


def _registry(registry: Registry, now_s: float) -> dict[str, Any]:
    age_s = registry.age_s(now_s)
    return {
        "address": registry.address,
        "age_s": None if age_s is None else round(age_s, 1),
        "servers": registry.servers,
        "why": registry.why,
    }


def _server(server: Server, now_s: float) -> dict[str, Any]:
    found: dict[str, Any] = {
        "url": server.url,
        "is_well": server.is_well,
        "requests": server.under_way,
        "chosen": server.counts.chosen,
        "failures": server.counts.failed,
    }
    if server.role == "prefill":
        found["bootstrap_port"] = server.bootstrap_port
        found["prompt_tokens"] = server.counts.prompt_tokens
        found["cached_tokens"] = server.counts.cached_tokens
    if not server.is_well:
        found["ill_for_s"] = round(server.ill_for_s(now_s), 1)
        found["why"] = server.why_ill
    return found


def _views(views: Sequence[PrefillView], now_s: float) -> dict[str, Any]:
    if len(views) == 1:
        return _view(views[0], now_s)
    return {"dp_ranks": [_view(view, now_s) for view in views]}


def _decode(view: DecodeView, now_s: float) -> dict[str, Any]:
    load, free = view.load(now_s), view.free_tokens(now_s)
    return {
        "told_requests": None if load is None else load.requests,
        "free_tokens": None if free is None else round(free),
        "events": None if view.events is None else _events(view.events, now_s),
    }


def _view(view: PrefillView, now_s: float) -> dict[str, Any]:
    return {
        "expected_cached_tokens": round(view.counts.expected_hits),
        "prefixes_missed": view.counts.missed,
        "memory": "never hits" if view.is_vain else "live",
        "queue_s": view.queue_s(now_s),
        **view.fit.times._asdict(),
        "load_token_s": view.load_fit.token_s(view.fit.times.token_s),
        "expected_store_tokens": round(view.counts.expected_loads),
        "store_tokens": round(view.counts.loads),
        "median_error": view.median_error,
        "events": None if view.events is None else _events(view.events, now_s),
    }


def _events(stream: EventStream, now_s: float) -> dict[str, Any]:
    age_s = stream.age_s(now_s)
    return {
        "state": stream.state(now_s),
        "age_s": None if age_s is None else round(age_s, 1),
        "pages": len(stream),
        "pages_left_out": stream.left_out,
        "gaps": stream.gaps,
        "losses": stream.losses,
    }


def as_text(status: dict[str, Any]) -> str:
    """``as_json`` for people: a line for each server."""
    ended = ", ".join(f"{count} {end}" for end, count in status["ended"].items()) or "none yet"
    lines = [f"requests: {status['requests']} under way; ended: {ended}", ""]
    if status["store"] is not None:
        store = status["store"]
        lines.append(
            f"store: {store['state']}, {store['owners']} owners, {store['objects']} objects, "
            f"{store['found']} of {store['looks']} prompts found"
        )
    for one in status["registries"]:
        age = "never heard" if one["age_s"] is None else f"heard {one['age_s']} s ago"
        why = f": {one['why']}" if one["why"] else ""
        lines.append(f"registry {one['address']}: {one['servers']} servers, {age}{why}")
    for role, servers in status["servers"].items():
        for one in servers:
            health = "well" if one["is_well"] else f"ill for {one['ill_for_s']} s: {one['why']}"
            lines.append(
                f"{role:8}{one['url']:40} {one['requests']:6} under way {one['chosen']:9} chosen "
                f"{one['failures']:6} failures  {health}"
            )
    return "\n".join([*lines, ""])
