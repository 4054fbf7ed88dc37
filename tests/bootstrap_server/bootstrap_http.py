# SPDX-License-Identifier: Apache-2.0
"""Asking a bootstrap server as SGLang 0.5.23 asks."""

from __future__ import annotations

import requests

from bootstrap_server import BootstrapServer

__all__ = ["get", "put_route", "route", "route_body", "url"]


def route_body(**changes: object) -> dict[str, object]:
    """What `CommonKVManager.register_to_bootstrap` sends."""
    return {
        "attn_tp_size": 2,
        "attn_tp_rank": 0,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "10.0.0.7",
        "rank_port": 40_000,
        "page_size": 16,
        "kv_cache_dtype": "torch.bfloat16",
        "kv_layout": None,
        "dsv41_spec_layout": None,
        "load_balance_method": "follow_bootstrap_room",
        "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False,
        "prefill_http_port": 30_000,
        "decode_allocation_policy": "early",
    } | changes


def url(server: BootstrapServer, path: str) -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def route(dp: object, cp: object, tp: object, pp: object) -> str:
    return (
        f"/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
    )


def put_route(server: BootstrapServer, **changes: object) -> requests.Response:
    return requests.put(url(server, "/route"), json=route_body(**changes), timeout=30)


def get(server: BootstrapServer, path: str) -> requests.Response:
    return requests.get(url(server, path), timeout=30)
