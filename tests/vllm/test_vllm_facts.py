# SPDX-License-Identifier: Apache-2.0
"""Which servers of vLLM the store refuses, and what tells their pages apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_serving.model import make_model
from vllm_makers import caches, mixed_caches, server

from sglang_mooncake.vllm.facts import check_server, heads_of_rank, share_of_rank, signature_of
from sglang_mooncake.vllm.page_map import CacheTensor, PageMap

GROUPS = caches("FullAttentionSpec")
PAGES = PageMap([CacheTensor(4096, (8, 2, 32, 64), (4096, 2048, 64, 1), 4)], 8)


def test_an_ordinary_server_is_served() -> None:
    check_server(server(), GROUPS)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"speculative_config": object()}, "with --speculative-config pages may hold tokens"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode is not supported"),
        ({"lora_config": object()}, "leave --enable-lora or the store out"),
        ({"weight_transfer_config": object()}, "leave --weight-transfer-config or the store out"),
        (
            {"kv_transfer_config__kv_load_failure_policy": "fail"},
            'say "recompute" in --kv-transfer',
        ),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "use sha256 or sha256_cbor"),
    ],
)
def test_a_server_that_could_take_wrong_pages_is_refused(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_server(server(**changed), GROUPS)


def test_a_model_with_several_caches_is_refused() -> None:
    several = caches("FullAttentionSpec", "SlidingWindowSpec")
    with pytest.raises(ValueError, match="this model has 2 groups of KV caches") as refused:
        check_server(server(), several)
    assert "With --disable-hybrid-kv-cache-manager vLLM keeps windows" in str(refused.value)


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "RSWASpec", "MambaSpec", "Another"])
def test_a_model_whose_blocks_go_before_its_request_is_refused(kind: str) -> None:
    for one in (caches(kind), mixed_caches("FullAttentionSpec", kind)):
        with pytest.raises(ValueError, match=f"vLLM's kind {kind}, which gives blocks back"):
            check_server(server(), one)


def test_layers_of_several_sizes_are_no_several_caches() -> None:
    check_server(server(), mixed_caches("FullAttentionSpec", "MLAAttentionSpec"))


@pytest.mark.parametrize(
    ("heads", "size", "expected"),
    [
        (4, 1, [(0, 4)]),
        (4, 2, [(0, 2), (2, 4)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1), (0, 1)]),
    ],
)
def test_ranks_have_the_heads_that_they_compute(
    heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    config = server(model_config__heads=heads, parallel_config__tensor_parallel_size=size)
    assert [heads_of_rank(config, rank) for rank in range(size)] == expected
    shares = [share_of_rank(config, rank) for rank in range(size)]
    assert len(set(zip(expected, shares, strict=True))) == size, "each stores other pages"
    assert sum(1 / parts for _, parts in shares) == len(set(expected)), "and all of them do"


def test_every_rank_has_all_of_a_latent() -> None:
    assert heads_of_rank(server(model_config__use_mla=True), 1) == (0, 0)


def test_of_a_latent_every_rank_stores_its_share() -> None:
    config = server(model_config__use_mla=True, parallel_config__tensor_parallel_size=8)
    assert [share_of_rank(config, rank) for rank in range(8)] == [(rank, 8) for rank in range(8)]


@pytest.mark.parametrize(
    "changed",
    [
        {"model_config__dtype": "torch.bfloat16"},
        {"model_config__quantization": "fp8"},
        {"model_config__hf_overrides": {"rope_theta": 1}},
        {"model_config__hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 2})},
        {"model_config__max_model_len": 8192},
        {"load_config__load_format": "dummy"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__block_size": 16},
    ],
)
def test_pages_of_other_values_have_another_signature(changed: dict[str, Any]) -> None:
    assert digest(server(**changed)) != digest(server())


def digest(
    config: Any, kernel: str = "K", rank: int = 0, weights: str | None = "w", release: str = "1"
) -> bytes:
    return signature_of(config, PAGES, kernel, rank, weights, release).digest


def test_where_a_model_lies_does_not_count() -> None:
    said = {"rope_theta": 1, "_name_or_path": "/elsewhere"}
    moved = server(model_config__hf_config=SimpleNamespace(to_dict=lambda: said))
    assert digest(moved) == digest(server())


def test_kernels_ranks_and_weights_are_told_apart() -> None:
    config = server(parallel_config__tensor_parallel_size=2)
    found = {
        digest(config),
        digest(config, kernel="another"),
        digest(config, rank=1),
        digest(config, weights="others"),
        digest(config, release="2"),
    }
    assert len(found) == 5
    assert digest(config) == digest(config)


@pytest.mark.slow
def test_weights_are_told_by_their_files(tmp_path: Path) -> None:
    one, two = (server(make_model("llama", tmp_path, seed=seed)) for seed in (0, 1))
    assert digest(one, weights=None) != digest(two, weights=None)


@pytest.mark.parametrize(
    "changed",
    [
        {"load_config__load_format": "dummy"},
        {"load_config__load_format": "runai_streamer"},
        {"model_config__quantization": "bitsandbytes"},
        {"model_config__model": "no-such-owner/no-such-model"},
    ],
)
def test_weights_that_cannot_be_told_apart_are_refused(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    config = server(make_model("llama", tmp_path), **changed)
    with pytest.raises(ValueError, match='give a text of your own as "weights"'):
        digest(config, weights=None)
