# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM on the CPU with a model whose KV cache is one latent (MLA), which each TP rank
has as a whole: a prefill and a decode server answer as one ordinary server does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, compare, make_requests
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import VllmServer, ask, handed_over, pair_flags, start_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = make_requests(4, 600, seed=43)
TOKENS = sum(len(one.input_ids) for one in REQUESTS)
PREFILL_TP = 2
#: What vLLM's kernels for a latent have.
BLOCK = ["--block-size", "16"]


@dataclass
class Servers:
    prefill: VllmServer
    decode: VllmServer
    stats: Path
    #: What an ordinary server has answered.
    expected: list[Answer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model, stats = make_model("deepseek-wide"), tmp_path_factory.mktemp("stats")
    with (
        tempfile.TemporaryDirectory(prefix="kv") as path,
        Fleet(tmp_path_factory.mktemp("vllm")) as fleet,
    ):
        place = Path(path)
        alone = start_vllm(fleet, "alone", model, place, BLOCK)
        flags = pair_flags("kv_producer", registry_port=fleet.port(), stats_dir=str(stats))
        prefill = start_vllm(fleet, "prefill", model, place, [*BLOCK, *flags], tp=PREFILL_TP)
        flags = [*BLOCK, *pair_flags("kv_consumer")]
        decode = start_vllm(fleet, "decode", model, place, flags, core=1)
        wait_ready([alone, prefill, decode])
        expected = ask(alone, REQUESTS)
        alone.stop()
        yield Servers(prefill, decode, stats, expected)


def test_a_pair_with_a_latent_answers_as_one_server(servers: Servers) -> None:
    with Proxy(servers.prefill.url, servers.decode.url) as proxy:
        answers = ask(proxy, REQUESTS)
    assert not compare(servers.expected, answers)
    label = 'source="external_kv_transfer"'
    came = servers.decode.metric("vllm:prompt_tokens_by_source_total", label)
    assert TOKENS - came <= len(REQUESTS), "a last token of each is computed on decode"
    assert handed_over(servers.stats, len(REQUESTS) * PREFILL_TP)
