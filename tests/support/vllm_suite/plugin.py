# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest's: where vLLM's own tests of connectors make servers with NIXL's connector,
they make them with the one for prefill and decode servers, and requests have its offers.

The tests are about vLLM's scheduler and the scheduler's half of a connector; no worker runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest
from cpu_serving.model import make_model

from sglang_mooncake.vllm.pd_connector import PDConnector
from sglang_mooncake.vllm.pd_offers import PREFILLED, Offer, prompt_digest

__all__ = ["pytest_collection_modifyitems"]

REGISTRY: Final = "127.0.0.1:8998"
#: Of vLLM's requests, unless a test says another one.
BLOCK_SIZE: Final = 16
_FIELDS: Final = "asks the answer for remote_block_ids, which NIXL's connector alone has"
_GROUPS: Final = "a model with several groups of KV caches is refused when the server starts"
_DRAFTS: Final = f"{_GROUPS}, and so is --speculative-config"
#: Tests that cannot be about this connector, and why.
LEFT_OUT: Final[dict[str, str]] = {
    "test_remote_decode_lifecycle::test_short_prompt_lifecycle": _FIELDS,
    "test_remote_decode_lifecycle::test_prefix_cache_lifecycle": _FIELDS,
    "test_remote_prefill_lifecycle::test_p_side_chunked_prefill_mamba": _GROUPS,
    "test_remote_prefill_lifecycle::test_async_load_reserves_blocks_for_promotion_margin": _DRAFTS,
    "test_remote_prefill_lifecycle"
    "::test_async_load_does_not_double_reserve_mamba_spec_blocks": _GROUPS,
    "test_kv_load_failure_recovery"
    "::test_block_level_load_failure_fails_closed_with_multiple_groups": _GROUPS,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Once the tests' modules are imported."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        _put_in(module)
    for item in items:
        name = f"{item.path.stem}::{getattr(item, 'originalname', item.name)}"
        if name in LEFT_OUT:
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT[name]))


def _put_in(module: ModuleType) -> None:
    role = "kv_producer" if "remote_decode" in module.__name__ else "kv_consumer"
    settings = {
        "model": str(make_model("llama")),
        "kv_connector": "PDConnector",
        "kv_connector_module_path": PDConnector.__module__,
        "kv_role": role,
        "kv_connector_extra_config": {"host": "127.0.0.1"},
    }
    config: Callable[..., Any] = module.create_vllm_config
    module.create_vllm_config = lambda **given: config(**(settings | given))
    for name, change in (("create_scheduler", _registered), ("create_request", _offered)):
        if hasattr(module, name):
            setattr(module, name, functools.partial(change, getattr(module, name)))


def _registered(create: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """Its workers have told the connector of their ranks."""
    scheduler = create(*given, **more)
    if isinstance(scheduler.connector, PDConnector):
        scheduler.connector._registration = SimpleNamespace(address=REGISTRY, take_given_up=list)
    return scheduler


def _offered(create: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """A prefill server with this connector has computed its prompt."""
    request = create(*given, **more)
    if (request.kv_transfer_params or {}).get(PREFILLED):
        tokens, size = request.prompt_token_ids, more.get("block_size", BLOCK_SIZE)
        prompt = prompt_digest(tokens, size, request.block_hashes, [])
        request.kv_transfer_params = Offer(REGISTRY, 7, len(tokens), prompt, {}).params()
        request.kv_transfer_params["room"] += int(request.request_id.removeprefix("id-"))
    return request
