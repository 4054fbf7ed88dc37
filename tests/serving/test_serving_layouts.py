# SPDX-License-Identifier: Apache-2.0
"""Equal tokens in every layout that both servers share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.traffic import make_requests

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

CHUNK = 128
BY_QUERY = ("--load-balance-method", "round_robin")


def _decode_radix_cache() -> Layout:
    base = Layout.equal("decode-radix", page_size=1, chunked_prefill_size=CHUNK)
    decode = replace(base.decode, extra_args=("--disaggregation-decode-enable-radix-cache",))
    return replace(base, decode=decode)


def _by_query() -> Layout:
    base = Layout.equal("dp-attention-by-query", "qwen3", tp=2, dp_attention=True)
    return replace(base, prefill=replace(base.prefill, extra_args=BY_QUERY))


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "page16-chunked": lambda: Layout.equal("page16", page_size=16, chunked_prefill_size=CHUNK),
    "chunked-decode-radix": _decode_radix_cache,
    "tp2": lambda: Layout.equal("tp2", tp=2),
    "dp-attention-by-room": lambda: Layout.equal("dp", "qwen3", tp=2, dp_attention=True),
    "dp-attention-by-query": _by_query,
    "mla": lambda: Layout.equal("mla", "deepseek", page_size=16, chunked_prefill_size=CHUNK),
    "mla-tp2": lambda: Layout.equal("mla-tp2", "deepseek", tp=2),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]()


def test_the_pool_is_the_one_meant(serving: Serving) -> None:
    kind = "3 MLA buffers" if serving.model == "deepseek" else "6 K and V buffers"
    for server in (serving.pair.prefill, serving.pair.decode):
        assert kind in server.process.log_text()


def test_tokens_are_equal(serving: Serving) -> None:
    serving.assert_equal(make_requests(40, 900, seed=11), concurrency=16)


def test_prefixes_seen_before(serving: Serving) -> None:
    """The same prompts again, then prompts that continue them: cached pages on either side."""
    requests = make_requests(10, 500, seed=12)
    serving.assert_equal(requests, concurrency=8)
    serving.assert_equal(requests, concurrency=8)
    tails = make_requests(10, 60, seed=13)
    longer = [
        replace(request, input_ids=request.input_ids + tail.input_ids)
        for request, tail in zip(requests, tails, strict=True)
    ]
    serving.assert_equal(longer, concurrency=8)
