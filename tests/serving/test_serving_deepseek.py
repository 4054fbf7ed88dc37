# SPDX-License-Identifier: Apache-2.0
"""The commands that DeepSeek is served by, with a tiny DeepSeek-V3: DP attention, expert
parallelism with redundant experts that are moved about (EPLB), MTP, on two ranks each.

`docs/deepseek-recipes.md` says which of the published flags are here.
"""

from __future__ import annotations

import json

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.servers import ServerOptions
from cpu_serving.traffic import make_requests

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

MODEL = "deepseek-v3"
#: Without NCCL, SGLang has all ranks add up what the experts of each one say.
ON_A_CPU = ("--boundary-reduction", "ar")
EXPERTS = (
    *("--ep-size", "2", "--moe-dense-tp-size", "1", "--enable-dp-lm-head"),
    *("--ep-num-redundant-experts", "2", "--ep-dispatch-algorithm", "dynamic"),
    *("--enable-eplb", "--eplb-algorithm", "deepseek", "--eplb-rebalance-num-iterations", "10"),
    *("--expert-distribution-recorder-buffer-size", "10", "--eplb-rebalance-layers-per-chunk", "1"),
    *ON_A_CPU,
)
#: As measured elsewhere: which of 8 experts each of 10 places has at first, in each layer.
LOCATION = {"physical_to_logical_map": [[7, 6, 5, 4, 3, 2, 1, 0, 7, 0]] * 3}
PREFILL = (*EXPERTS, "--deepep-mode", "normal", "--disable-radix-cache")
DECODE = (*EXPERTS, "--deepep-mode", "low_latency", "--disable-radix-cache")
PREFILL += ("--init-expert-location", json.dumps(LOCATION))


@pytest.fixture(scope="module")
def layout() -> Layout:
    model = make_model(MODEL)
    servers = [
        ServerOptions(model, tp=2, dp_attention=True, mtp=True, extra_args=flags)
        for flags in (PREFILL, DECODE)
    ]
    return Layout("deepseek", MODEL, *servers)


def test_tokens_are_equal(serving: Serving) -> None:
    for seed in (51, 52):
        got = serving.assert_equal(make_requests(6, 300, seed=seed, new_tokens=24), concurrency=3)
        assert sum(answer.right_drafts for answer in got) > 0, "no draft was right"
    for server in (serving.pair.prefill, serving.pair.decode):
        log = server.process.log_text()
        for rank in range(2):
            assert f"DP{rank} TP{rank} EP{rank}" in log
    moved = "[EPLBManager] rebalance end"
    assert moved in serving.pair.decode.process.log_text(), "EPLB moved no expert"
