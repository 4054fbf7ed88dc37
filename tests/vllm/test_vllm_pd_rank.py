# SPDX-License-Identifier: Apache-2.0
"""Which servers of vLLM hand nothing over, and what a rank says of its KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pd_makers import BLOCK_BYTES, HOST, Cache, options, pair
from vllm_makers import caches, mixed_caches, server

import te
from bootstrap_server.admission.secret_file import write_secret_file
from sglang_mooncake.context import Deadlines
from sglang_mooncake.layout import ALONE, Plan
from sglang_mooncake.vllm.page_map import CacheTensor, PageMap
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_rank import (
    check_exposure,
    check_pair_server,
    context_of,
    layout_of,
    place_of,
    role_of,
    server_facts,
)

GROUPS = caches("FullAttentionSpec")
TWO_RANKS: dict[str, Any] = {"parallel_config__tensor_parallel_size": 2}


def of_pair(**changed: Any) -> Any:
    return server(**{"kv_transfer_config": SimpleNamespace(kv_role="kv_producer"), **changed})


@pytest.mark.parametrize(("said", "role"), [("kv_producer", "prefill"), ("kv_consumer", "decode")])
def test_a_server_of_either_role_is_served(said: str, role: str) -> None:
    config = of_pair(kv_transfer_config__kv_role=said)
    check_pair_server(config, GROUPS)
    assert role_of(config) == role


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"kv_transfer_config__kv_role": "kv_both"}, '"kv_role": "kv_both" is not supported'),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 2 is not"),
        ({"parallel_config__pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 is not"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode is not supported"),
        ({"speculative_config": object()}, "with --speculative-config the draft model's cache"),
        ({"weight_transfer_config": object()}, "leave --weight-transfer-config or the connector"),
        ({"cache_config__prefix_caching_hash_algo": "xxhash"}, "use sha256 or sha256_cbor"),
    ],
)
def test_a_server_that_cannot_hand_over_is_refused(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_pair_server(of_pair(**changed), GROUPS)


def test_a_model_with_several_caches_is_refused() -> None:
    several = caches("FullAttentionSpec", "SlidingWindowSpec")
    with pytest.raises(ValueError, match="this model has 2 groups of KV caches") as refused:
        check_pair_server(of_pair(), several)
    assert "With --disable-hybrid-kv-cache-manager vLLM keeps windows" in str(refused.value)


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "RSWASpec", "MambaSpec", "Another"])
def test_a_model_whose_blocks_go_before_its_request_is_refused(kind: str) -> None:
    for one in (caches(kind), mixed_caches("FullAttentionSpec", kind)):
        with pytest.raises(ValueError, match=f"vLLM's kind {kind}, which gives blocks back"):
            check_pair_server(of_pair(), one)


def test_layers_of_several_sizes_are_no_several_caches() -> None:
    check_pair_server(of_pair(), mixed_caches("FullAttentionSpec", "MLAAttentionSpec"))


@pytest.mark.parametrize(
    "changed",
    [
        {"cache_config__block_size": 64},
        {"cache_config__cache_dtype": "fp8"},
        {"model_config__dtype": "torch.bfloat16"},
    ],
)
def test_what_changes_values_is_told_to_the_other_server(changed: dict[str, Any]) -> None:
    pages = PageMap(Cache().tensors(), 16)
    facts = server_facts(of_pair(), pages, "K", "w", "0.32.0")
    assert facts != server_facts(of_pair(**changed), pages, "K", "w", "0.32.0")
    assert facts != server_facts(of_pair(), pages, "other", "w", "0.32.0")
    assert facts != server_facts(of_pair(), pages, "K", "others", "0.32.0")
    assert facts != server_facts(of_pair(), pages, "K", "w", "0.31.0")
    assert facts == server_facts(of_pair(), pages, "K", "w", "0.32.1")


@pytest.mark.parametrize("heads_first", [True, False])
def test_ranks_with_other_heads_say_the_same(heads_first: bool) -> None:
    whole, half = (Cache(heads=heads, heads_first=heads_first).tensors() for heads in (2, 1))
    said = [
        server_facts(config, PageMap(caches, 16), "K", "w", "0.32.0")
        for config, caches in ((of_pair(), whole), (of_pair(**TWO_RANKS), half))
    ]
    assert said[0] == said[1]
    other = PageMap(Cache(heads_first=not heads_first).tensors(), 16)
    assert server_facts(of_pair(), other, "K", "w", "0.32.0") != said[0]


def test_a_rank_with_other_heads_than_the_models_is_refused() -> None:
    caches = Cache(heads=2).tensors()
    for config, place in ((of_pair(**TWO_RANKS), 1), (of_pair(model_config__use_mla=True), 0)):
        with pytest.raises(ValueError, match="has 2 heads, where a model of"):
            layout_of(config, caches, "K", place_of(config, place))
    three = of_pair(model_config__heads=3, **TWO_RANKS)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2: the model has 3 KV heads"):
        layout_of(three, caches, "K", place_of(three, 0))


def test_a_layout_has_each_block_of_each_layer() -> None:
    source, target = Cache(seed=1), Cache()
    plan = Plan(
        layout_of(of_pair(), source.tensors(), "K", ALONE),
        layout_of(of_pair(), target.tensors(), "K", ALONE),
    )
    copies = plan.kv(np.array([1, 5]), np.array([7, 3])).array.tolist()
    ours, theirs = source.bytes.ctypes.data, target.bytes.ctypes.data
    layers, blocks = source.bytes.shape[:2]
    width = BLOCK_BYTES
    assert sorted(copies) == sorted(
        (ours + (layer * blocks + here) * width, theirs + (layer * blocks + there) * width, width)
        for layer in range(layers)
        for here, there in ((1, 7), (5, 3))
    )


def test_blocks_with_other_layers_between_them_are_refused() -> None:
    one, *_ = Cache().tensors()
    apart = CacheTensor(one.address, (8, 256), (512, 1), 1)
    with pytest.raises(ValueError, match="256 bytes lie 512 bytes apart"):
        layout_of(of_pair(), [apart], "K", ALONE)


def test_a_rank_is_known_by_the_settings_names() -> None:
    given = options(hold_timeout_s=3.0, load_timeout_s=4)
    layout, place = layout_of(of_pair(), Cache().tensors(), "K", ALONE), ALONE
    prefill = context_of("prefill", given, layout, place, HOST)
    assert (prefill.deadlines.bootstrap_s, prefill.names.bootstrap) == (3.0, "hold_timeout_s")
    decode = context_of("decode", given, layout, place, HOST)
    assert (decode.deadlines.bootstrap_s, decode.names.bootstrap) == (4, "load_timeout_s")


def test_a_rank_waits_for_a_sign_of_life_as_long_as_it_is_told_to() -> None:
    layout = layout_of(of_pair(), Cache().tensors(), "K", ALONE)
    usual, longer = (
        context_of("prefill", PdOptions.of(said), layout, ALONE, HOST).deadlines
        for said in ({}, {"silence_timeout_s": 30.2})
    )
    assert usual.heartbeat_failures_max == Deadlines().heartbeat_failures_max
    assert 30.2 <= longer.heartbeat_s * longer.heartbeat_failures_max < 30.7


def test_an_engine_waits_for_progress_as_long_as_it_is_told_to() -> None:
    assert PdOptions.of({}).stall_timeout_s == te.Config().stall_timeout_s
    with pair(prefill={"stall_timeout_s": 2.5}) as two:
        assert two.prefill.engine._config.stall_timeout_s == 2.5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"hold_timeout": 3}, "did you mean 'hold_timeout_s'?"),
        ({"hold_timeout_s": "3"}, "hold_timeout_s='3' must be a number"),
        ({"hold_timeout_s": 0}, "hold_timeout_s=0 must be a positive number"),
        ({"silence_timeout_s": -1}, "silence_timeout_s=-1 must be a positive number"),
        ({"load_timeout_s": float("inf")}, "load_timeout_s=inf must be a positive number"),
        ({"registry_port": 65_536}, "registry_port=65536 must be between"),
        ({"registry": "host"}, "registry='host'"),
        ({"registries": "host"}, "registries='host' must be a list of texts"),
        ({"registries": ["a b"]}, "'a b' is not of the form"),
        ({"keys": 1}, "no setting 'keys'"),
    ],
)
def test_a_setting_that_is_none_is_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        PdOptions.of(given)


def test_settings_come_from_json(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    write_secret_file(secret)
    said = PdOptions.of({"secret_file": str(secret), "transports": ["tcp"], "stats_dir": "/s"})
    assert said.keys
    assert said.transports == ("tcp",)
    assert said.stats_dir == Path("/s")


def test_a_public_address_takes_a_secret_or_the_operators_word() -> None:
    with pytest.raises(ValueError, match='"insecure": true'):
        check_exposure(options(), "8.8.8.8")
    assert check_exposure(options(insecure=True), "8.8.8.8")
    assert check_exposure(options(), "10.0.0.1")
    assert check_exposure(options(), "127.0.0.1") is None
    assert replace(options(), insecure=True).insecure
