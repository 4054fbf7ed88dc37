# SPDX-License-Identifier: Apache-2.0
"""Equal tokens in every layout, whether both servers share it or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import LAYERS, make_model
from cpu_serving.servers import ServerOptions
from cpu_serving.traffic import make_requests

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

CHUNK = 128
BY_QUERY = ("--load-balance-method", "round_robin")
DECODE_RADIX = ("--disaggregation-decode-enable-radix-cache",)
Options = dict[str, Any]


def _pair(model: str, prefill: Options, decode: Options, **both: Any) -> Callable[[], Layout]:
    def make() -> Layout:
        path = make_model(model)
        servers = [ServerOptions(path, **(both | options)) for options in (prefill, decode)]
        return Layout("pair", model, *servers)

    return make


TP2: Options = {"tp": 2}
PP2: Options = {"pp": 2}
DP2: Options = {"tp": 2, "dp_attention": True}
CHUNKED: Options = {"chunked_prefill_size": CHUNK}

LAYOUTS: dict[str, Callable[[], Layout]] = {
    "page16-chunked": _pair("llama", {}, {}, page_size=16, **CHUNKED),
    "chunked-decode-radix": _pair("llama", {}, {"extra_args": DECODE_RADIX}, **CHUNKED),
    "tp2": _pair("llama", TP2, TP2),
    "dp-attention-by-room": _pair("qwen3", DP2, DP2),
    "dp-attention-by-query": _pair("qwen3", DP2 | {"extra_args": BY_QUERY}, DP2),
    "mla": _pair("deepseek", {}, {}, page_size=16, **CHUNKED),
    "mla-tp2": _pair("deepseek", TP2, TP2),
    # Heads are sliced, both ways.
    "tp2-tp1-page64": _pair("llama", TP2, {}, page_size=64, **CHUNKED),
    "tp1-tp2-decode-radix": _pair("llama", {}, TP2 | {"extra_args": DECODE_RADIX}),
    # One KV head, which both ranks of the wider server store.
    "replicated-tp2-tp1": _pair("llama-mqa", TP2, {}, page_size=16, **CHUNKED),
    "replicated-tp1-tp2": _pair("llama-mqa", {}, TP2),
    "dp2-tp1": _pair("qwen3", DP2, {}, page_size=16),
    "tp2-dp2": _pair("qwen3", TP2, DP2, **CHUNKED),
    "pp2-pp1": _pair("llama", PP2, {}, page_size=16, **CHUNKED),
    "pp2-pp2": _pair("llama", PP2, PP2),
    # One latent, which one of the two ranks sends while the other is only asked.
    "mla-tp2-tp1-page64": _pair("deepseek", TP2, {}, page_size=64, **CHUNKED),
    "mla-tp1-tp2": _pair("deepseek", {}, TP2),
    # Sliding windows: state beside the KV pages, handed over with the last chunk.
    "windows-tp2-tp1": _pair("mellum", TP2, {}, page_size=16, **CHUNKED),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]()


def test_the_pool_is_the_one_meant(serving: Serving) -> None:
    for server in (serving.pair.prefill, serving.pair.decode):
        layers = 1 if serving.model == "mellum" else LAYERS  # without those of windows
        layers //= server.options.pp  # of one stage; the last one may have one more
        kind = "MLA buffers" if serving.model == "deepseek" else "K and V buffers"
        count = layers if serving.model == "deepseek" else 2 * layers
        assert f"{count} {kind}" in server.process.log_text()


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
