# SPDX-License-Identifier: Apache-2.0
"""The server over real sockets, asked as SGLang 0.5.23 asks, and as nobody should."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import msgspec
import pytest
import requests

from bootstrap_server import (
    BootstrapClient,
    BootstrapServer,
    RankCoords,
    RankRecord,
    Topology,
    app,
)
from bootstrap_server.app import BODY_BYTES_MAX
from bootstrap_server.sglang_http import ROOMS_PER_QUERY_MAX

MakeRecord = Callable[..., RankRecord]


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
    return requests.put(url(server, "/route"), json=route_body(**changes), timeout=5)


def get(server: BootstrapServer, path: str) -> requests.Response:
    return requests.get(url(server, path), timeout=5)


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
        url(server, "/register_dp_rank"), json={"bootstrap_room": room, "dp_rank": 3}, timeout=5
    )
    assert (registered.status_code, registered.text) == (200, "OK")
    found = requests.post(
        url(server, "/query_dp_ranks"), json={"bootstrap_rooms": [room, 5]}, timeout=5
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
    answer = get(server, "/v1/instance")
    assert answer.status_code == 503
    body = answer.json()
    assert (body["registered"], body["expected"]) == (1, 3)
    assert body["missing"] == [{"dp": 0, "cp": 0, "tp": tp, "pp": 0} for tp in (0, 2)]
    assert "1 of 3 ranks" in body["error"]


HOSTILE_BODIES = [
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe{}",
    b'"\\ud800"',
    b"[" * 100_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b"{}",
]
PATHS = [
    ("PUT", "/route"),
    ("PUT", "/v1/ranks"),
    ("POST", "/register_dp_rank"),
    ("POST", "/query_dp_ranks"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_bodies_that_are_no_bodies(server: BootstrapServer, method: str, path: str) -> None:
    with requests.Session() as session:
        for body in HOSTILE_BODIES:
            answer = session.request(method, url(server, path), data=body, timeout=5)
            assert answer.status_code == 400, body[:20]
            assert f"{method} {path}: bad body" in answer.text
        assert session.get(url(server, "/v1/instance"), timeout=5).json()["expected"] == 0


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_over_the_limit(
    server: BootstrapServer, method: str, path: str, chunked: bool
) -> None:
    def parts() -> object:
        for _ in range(17):
            yield b" " * (BODY_BYTES_MAX >> 4)

    data = parts() if chunked else b" " * (BODY_BYTES_MAX + 1)
    answer = requests.request(method, url(server, path), data=data, timeout=5)
    assert answer.status_code == 413
    assert str(BODY_BYTES_MAX) in answer.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_tp_rank": -1}, "tp rank is -1"),
        ({"attn_tp_rank": 2}, "tp rank 2 does not exist: tp_size is 2"),
        ({"attn_tp_rank": "0"}, "Expected `int`, got `str`"),
        ({"attn_tp_rank": True}, "Expected `int`, got `bool`"),
        ({"attn_tp_size": 10**30}, "tp_size is 1000000"),
        ({"pp_size": 0}, "pp_size is 0"),
        ({"attn_dp_size": 2, "system_dp_size": 2}, "cannot both exceed 1"),
        ({"rank_port": 0}, "port is 0"),
        ({"rank_ip": ""}, "host has 0 characters"),
        ({"page_size": None}, "Expected `int`, got `null`"),
        ({"kv_cache_dtype": "x" * 10_000}, "kv_cache_dtype has 10000"),
        ({"dsv41_spec_layout": {"a": {"b": 1}}}, "dsv41_spec_layout"),
        ({"load_balance_method": []}, "Expected `str`, got `array`"),
    ],
)
def test_bad_stock_records(server: BootstrapServer, changes: dict[str, object], words: str) -> None:
    answer = put_route(server, **changes)
    assert answer.status_code == 400
    assert words in answer.text
    assert "none of its ranks" in get(server, route(-1, -1, -1, -1)).text


def test_each_missing_field_is_named(server: BootstrapServer) -> None:
    required = list(route_body())[:14]
    for name in required:
        body = {key: value for key, value in route_body().items() if key != name}
        answer = requests.put(url(server, "/route"), json=body, timeout=5)
        assert answer.status_code == 400
        assert f"`{name}`" in answer.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("config.topology.tp_size", "tp_size is -7"),
        ("config.format.page_size", "page_size is -7"),
        ("config.protocol", "protocol is -7"),
        ("rank.coords.dp", "dp rank is -7"),
        ("rank.port", "port is -7"),
        ("rank.epoch", "epoch is -7"),
    ],
)
def test_bad_records_of_ours(
    server: BootstrapServer, make_record: MakeRecord, path: str, words: str
) -> None:
    body = msgspec.to_builtins(make_record(Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)))
    *outer, last = path.split(".")
    part = body
    for name in outer:
        part = part[name]
    part[last] = -7
    answer = requests.put(url(server, "/v1/ranks"), json=body, timeout=5)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert get(server, "/v1/instance").json()["expected"] == 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/register_dp_rank", {"bootstrap_room": -1, "dp_rank": 0}, "bootstrap_room is outside"),
        ("/register_dp_rank", {"bootstrap_room": 2**64, "dp_rank": 0}, "bootstrap_room is outside"),
        ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": -1}, "dp_rank -1"),
        ("/register_dp_rank", {"bootstrap_room": 1, "dp_rank": 10**9}, "dp_rank 1000000000"),
        ("/register_dp_rank", {"bootstrap_room": 1}, "`dp_rank`"),
        ("/query_dp_ranks", {"bootstrap_rooms": [1, "2"]}, "Expected `int`"),
        ("/query_dp_ranks", {"bootstrap_rooms": [-1]}, "bootstrap_room is outside"),
        ("/query_dp_ranks", {"bootstrap_rooms": [1] * (ROOMS_PER_QUERY_MAX + 1)}, "at most 32768"),
    ],
)
def test_bad_rooms(server: BootstrapServer, path: str, body: dict[str, object], words: str) -> None:
    answer = requests.post(url(server, path), json=body, timeout=5)
    assert answer.status_code == 400
    assert words in answer.text


def test_a_dp_rank_outside_the_instance_is_refused(server: BootstrapServer) -> None:
    put_route(server)
    answer = requests.post(
        url(server, "/register_dp_rank"), json={"bootstrap_room": 1, "dp_rank": 1}, timeout=5
    )
    assert (answer.status_code, answer.text) == (400, "dp_rank 1 does not exist: dp_size is 1")


@pytest.mark.parametrize("number", ["x", "1.0", "1_0", "٣", "9" * 10_000, "-2", "", "%00"])
def test_bad_query_numbers(server: BootstrapServer, number: str) -> None:
    answer = get(server, route(0, 0, number, 0))
    assert answer.status_code in (400, 414)
    assert answer.text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/instance", 404),
        ("PUT", "/v2/ranks", 404),
        ("DELETE", "/route", 405),
        ("POST", "/v1/ranks", 405),
        ("GET", "/query_dp_ranks", 405),
    ],
)
def test_unknown_paths_versions_and_methods(
    server: BootstrapServer, method: str, path: str, status: int
) -> None:
    answer = requests.request(method, url(server, path), timeout=5)
    assert answer.status_code == status
    sentence = json.loads(answer.text)["error"] if path.startswith("/v") else answer.text
    assert path in sentence
    assert ("/v1/instance" in sentence) == (status == 404)
    assert ("Allow" in answer.headers) == (status == 405)


def test_a_client_that_stops_in_mid_body_is_answered(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_DEADLINE_S", 0.01)
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert get(server, "/health").text == "OK"


@pytest.mark.parametrize(
    "noise",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the start of TLS
        b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{",  # and then gone
        b"PUT /route HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x00" * 4096,
    ],
)
def test_noise_on_the_socket_harms_nobody(server: BootstrapServer, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(noise)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    assert get(server, "/health").text == "OK"
    assert get(server, "/v1/instance").json()["expected"] == 0
