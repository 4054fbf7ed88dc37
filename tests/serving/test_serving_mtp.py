# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding (NextN/MTP) with a tiny DeepSeek-V3's own draft layer, on both servers and
on decode alone: the draft's KV cache and the hidden state that it goes on from are handed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.traffic import make_requests, send_all

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

MODEL = "deepseek-v3"
LAYERS = 3
NEW_TOKENS = 24
#: (prefill, decode)
LAYOUTS = {
    "both": (
        {"mtp": True, "tp": 2, "page_size": 16, "chunked_prefill_size": 128},
        {"mtp": True, "page_size": 16},
    ),
    "decode-alone": ({}, {"mtp": True}),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.by_turns(name)) for name in LAYOUTS],
)
def layout(request: pytest.FixtureRequest) -> Layout:
    model = make_model(MODEL)
    servers = [ServerOptions(model, **options) for options in LAYOUTS[request.param]]
    return Layout(f"mtp-{request.param}", MODEL, *servers)


@pytest.fixture(scope="module")
def drafting(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One ordinary server that drafts."""
    with Fleet(tmp_path_factory.mktemp("drafting"), nursery) as fleet:
        server = fleet.server("single", ServerOptions(make_model(MODEL), mtp=True))
        wait_ready([server])
        yield server


def test_tokens_are_equal_and_so_are_the_drafts(serving: Serving, drafting: Server) -> None:
    pair = serving.pair
    for server in (pair.prefill, pair.decode):
        buffers = LAYERS + 1 if server.options.mtp else LAYERS
        assert f"{buffers} MLA buffers" in server.process.log_text()
    requests = make_requests(12, 500, seed=41, new_tokens=NEW_TOKENS)
    for _ in range(2):  # the second time prefill finds all but the last pages in its cache
        got = serving.assert_equal(requests, concurrency=4)
        right = sum(answer.right_drafts for answer in got)
        assert right > 0, "no draft was right"
        if pair.prefill.options.mtp:
            # A draft without its prompt's KV and hidden state would be right less often.
            alone = send_all(drafting.url, requests, concurrency=4)
            assert [a.verified for a in got] == [a.verified for a in alone]
            assert right == sum(answer.right_drafts for answer in alone)


def test_prompts_that_go_on_from_cached_ones(serving: Serving) -> None:
    requests = make_requests(6, 300, seed=42, new_tokens=NEW_TOKENS)
    answers = serving.assert_equal(requests, concurrency=3)
    longer = [
        replace(request, input_ids=request.input_ids + answer.output_ids + (5, 6, 7))
        for request, answer in zip(requests, answers, strict=True)
    ]
    serving.assert_equal(longer, concurrency=3)
