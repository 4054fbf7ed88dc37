# SPDX-License-Identifier: Apache-2.0
"""What must hold of a running pair: the tokens of one ordinary server, our classes, whole pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cpu_serving import stats
from cpu_serving.model import make_model
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import Fleet, Pair, Server, ServerOptions, wait_ready
from cpu_serving.traffic import Answer, Request, compare, send_all

__all__ = ["UNVERIFIED", "VERIFIED", "Layout", "Reference", "Serving"]

VERIFY = "SGLANG_MOONCAKE_VERIFY"
#: Of a server whose requests are all compared by digests.
VERIFIED = {VERIFY: "all"}
#: Of one whose wrong tokens a test wants to see: digests would fail the request before.
UNVERIFIED = {VERIFY: "off"}

Key: TypeAlias = tuple[str, tuple[int, ...], int]


@dataclass(frozen=True)
class Layout:
    """What a pair looks like."""

    name: str
    model: str
    prefill: ServerOptions
    decode: ServerOptions

    @classmethod
    def equal(cls, name: str, model: str = "llama", **options: Any) -> Layout:
        """Both servers with the same `ServerOptions`."""
        both = ServerOptions(make_model(model), **options)
        return cls(name, model, both, both)


class Reference:
    """What one ordinary server answers. A server per model, started when first asked."""

    def __init__(
        self, fleet: Fleet, also: Callable[[ServerOptions], ServerOptions] | None = None
    ) -> None:
        """`also`: what else the servers' options shall be."""
        self._fleet = fleet
        self._also = also
        self._servers: dict[str, Server] = {}
        self._known: dict[Key, Answer] = {}

    def answers(self, model: str, requests: Sequence[Request]) -> list[Answer]:
        new = [request for request in requests if _key(model, request) not in self._known]
        if new:
            for request, answer in zip(new, self._ask(model, new), strict=True):
                self._known[_key(model, request)] = answer
        return [self._known[_key(model, request)] for request in requests]

    def _ask(self, model: str, requests: Sequence[Request]) -> list[Answer]:
        if model not in self._servers:
            options = ServerOptions(make_model(model))
            if self._also is not None:
                options = self._also(options)
            self._servers[model] = self._fleet.server("single", options, name=f"single-{model}")
        wait_ready([self._servers[model]])
        # Only the tokens matter here, not what tells the servers of a pair which room it is.
        plain = [Request(request.input_ids, request.new_tokens) for request in requests]
        answers = send_all(self._servers[model].url, plain, concurrency=32)
        errors = [answer.error for answer in answers if answer.error]
        assert not errors, errors[0]
        return answers


@dataclass(frozen=True)
class Serving:
    """A running pair, and what its answers must be equal to."""

    pair: Pair
    model: str
    reference: Reference

    @property
    def url(self) -> str:
        return self.pair.router.url

    def expected(self, requests: Sequence[Request]) -> list[Answer]:
        return self.reference.answers(self.model, requests)

    def assert_equal(self, requests: Sequence[Request], concurrency: int = 32) -> list[Answer]:
        """Send through the router; every request must get the tokens that one server gives."""
        got = send_all(self.url, requests, concurrency)
        errors = [answer.error for answer in got if answer.error]
        assert not errors, f"{len(errors)} of {len(got)} failed, the first with: {errors[0]}"
        different = compare(self.expected(requests), got)
        assert not different, f"tokens differ in requests {different} of {len(got)}"
        return got

    def assert_whole(self) -> None:
        """Our classes served on every rank, no page is missing from the idle pools, and where the
        KV cache was to be compared by digests, all of it is equal."""
        for server in (self.pair.prefill, self.pair.decode):
            stats.read_stats(server)
            if server.options.extra_env.get(VERIFY) == "all":
                ranks = stats.collect(server, time.time())
                differ = [rank.digests for rank in ranks if rank.digests["different"]]
                assert not differ, f"digests differ: {differ}"
                served = sum(rank.rooms["done"] for rank in ranks)
                cells = sum(rank.digests["cells"] for rank in ranks)
                assert cells or not served, f"of {served} requests nothing was digested"
            assert leaked_pages(server) == 0, f"the {server.process.name} leaks"


def _key(model: str, request: Request) -> Key:
    return model, request.input_ids, request.new_tokens
