# SPDX-License-Identifier: Apache-2.0
"""KV that leaves layer by layer in other layouts: sliced heads, DP attention, latents, and pools
that are said to be CUDA memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cpu_serving.cuda import PretendedCuda, build_driver
from cpu_serving.expectations import Layout, Serving
from cpu_serving.layerwise import Layerwise
from cpu_serving.traffic import make_requests
from layers import bytes_early
from serving_layouts import Case

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

CASES = {
    "tp2-tp1": Case("llama", "tp2", "tp1", 16, chunked=True),
    "dp2-tp1": Case("qwen3", "dp2", "tp1", 16, chunked=True),
    # Its pools are said to be CUDA memory, too.
    "mla-cuda": Case("deepseek", "tp1", "tp1", 16, chunked=True),
    "dp2-dp2": Case("qwen3", "dp2", "dp2"),
    "mla-tp2-tp1": Case("deepseek", "tp2", "tp1", 64, chunked=True),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.by_turns(name)) for name in CASES],
)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    layout = CASES[request.param].layout()
    prefill, decode = replace(layout.prefill, layerwise=Layerwise(always=True)), layout.decode
    if request.param.endswith("cuda"):
        cuda = PretendedCuda(build_driver(tmp_path_factory.mktemp("driver")))
        prefill, decode = replace(prefill, cuda=cuda), replace(decode, cuda=cuda)
    return replace(layout, prefill=prefill, decode=decode)


def test_tokens_are_equal_and_bytes_leave_early(serving: Serving) -> None:
    with bytes_early(serving) as early:
        requests = make_requests(12, 400, seed=61)
        serving.assert_equal(requests, concurrency=6)
        serving.assert_equal(requests, concurrency=6)  # prefixes are known now
    early.assert_share(0)
