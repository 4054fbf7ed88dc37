# SPDX-License-Identifier: Apache-2.0
"""The server over real sockets, asked as SGLang 0.5.23 asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import requests
from bootstrap_http import get, put_route, route, url

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    RankCoords,
    RankRecord,
    Topology,
)

MakeRecord = Callable[..., RankRecord]


def test_sglang_registers_and_resolves_as_with_its_own_server(server: BootstrapServer) -> None:
    assert get(server, route(-1, -1, -1, -1)).status_code == 503
    answer = put_route(server)
    assert (answer.status_code, answer.text) == (200, "OK")
    # The restart of a rank is not another rank.
    assert put_route(server, rank_port=40_001).status_code == 200
    waiting = get(server, route(-1, -1, -1, -1))
    assert waiting.status_code == 503
    assert "1 of 2 ranks have registered, missing (dp 0 cp 0 tp 1 pp 0)" in waiting.text
    assert get(server, route(0, 0, 0, 0)).status_code == 503
    assert put_route(server, attn_tp_rank=1, rank_port=40_002).status_code == 200

    topology = get(server, route(-1, -1, -1, -1))
    assert topology.status_code == 200
    # Keyword arguments of PrefillServerInfo; absent layouts are left out, as by SGLang.
    assert topology.json() == {
        "attn_tp_size": 2,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "page_size": 16,
        "kv_cache_dtype": "torch.bfloat16",
        "follow_bootstrap_room": True,
        "enable_dsa_cache_layer_split": False,
        "enable_kv_cache_sharding": False,
        "prefill_http_port": 30_000,
        "decode_allocation_policy": "early",
    }
    for tp, port in ((0, 40_001), (1, 40_002)):
        rank = get(server, route(0, 0, tp, 0))
        assert (rank.status_code, rank.json()) == (
            200,
            {"rank_ip": "10.0.0.7", "rank_port": port},
        )
    assert get(server, route(0, 0, 2, 0)).status_code == 404
    assert get(server, "/route").status_code == 400
    health = get(server, "/health")
    assert (health.status_code, health.text) == (200, "OK")


@pytest.mark.parametrize("kind", ["attn_dp", "system_dp"])
def test_both_kinds_of_sglang_dp_are_one_axis(server: BootstrapServer, kind: str) -> None:
    layout = {"num_draft_tokens": 4, "compression_ratios": [0, 2], "state_item_lens": [[1], [2]]}
    for dp in range(2):
        body = {f"{kind}_size": 2, f"{kind}_rank": dp, "attn_tp_size": 1, "rank_port": 50_000 + dp}
        answer = put_route(
            server,
            **body,
            load_balance_method="round_robin",
            dsv41_spec_layout=layout,
            kv_layout="x",
        )
        assert answer.status_code == 200
    topology = get(server, route(-1, -1, -1, -1)).json()
    assert (topology["dp_size"], topology["follow_bootstrap_room"]) == (2, False)
    assert (topology["dsv41_spec_layout"], topology["kv_layout"]) == (layout, "x")
    assert get(server, route(1, 0, 0, 0)).json()["rank_port"] == 50_001


def test_sglang_rooms(server: BootstrapServer, client: BootstrapClient) -> None:
    room = 2**63 - 1
    registered = requests.post(
        url(server, "/register_dp_rank"), json={"bootstrap_room": room, "dp_rank": 3}, timeout=30
    )
    assert (registered.status_code, registered.text) == (200, "OK")
    found = requests.post(
        url(server, "/query_dp_ranks"), json={"bootstrap_rooms": [room, 5]}, timeout=30
    )
    assert (found.status_code, found.json()) == (200, {str(room): 3})
    client.register_dp_rank(5, 0)
    assert client.query_dp_ranks([room, 5, 6]) == {room: 3, 5: 0}


def test_contradicting_stock_ranks_get_400_and_change_nothing(server: BootstrapServer) -> None:
    put_route(server)
    for changes, words in (
        ({"decode_allocation_policy": "prefill_complete"}, ["early", "prefill_complete"]),
        ({"dsv41_spec_layout": {"n": 1}}, ["None", "{'n': 1}"]),
        ({"page_size": 1}, ["page_size 1,", "page_size 16"]),
    ):
        answer = put_route(server, attn_tp_rank=1, **changes)
        assert answer.status_code == 400
        assert all(word in answer.text for word in words)
    assert "1 of 2" in get(server, route(-1, -1, -1, -1)).text


def test_a_stock_decode_rank_is_told_that_ours_speak_another_protocol(
    server: BootstrapServer, client: BootstrapClient, make_record: MakeRecord
) -> None:
    client.register(make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0), protocol=1))
    assert get(server, route(-1, -1, -1, -1)).status_code == 200
    refused = get(server, route(0, 0, 0, 0))
    assert refused.status_code == 409
    assert "protocol 1 of sglang-mooncake" in refused.text


def test_not_ready_is_machine_readable(
    server: BootstrapServer, client: BootstrapClient, make_record: MakeRecord
) -> None:
    client.register(make_record(Topology(1, 1, 3, 1), RankCoords(0, 0, 1, 0)))
    answer = get(server, "/v1/instances/default")
    assert answer.status_code == 503
    body = answer.json()
    assert (body["registered"], body["expected"]) == (1, 3)
    assert body["missing"] == [{"dp": 0, "cp": 0, "tp": tp, "pp": 0} for tp in (0, 2)]
    assert "1 of 3 ranks" in body["error"]
