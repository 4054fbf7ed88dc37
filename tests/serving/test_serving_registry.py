# SPDX-License-Identifier: Apache-2.0
"""A decode server before registries that tell of prefill instances which cannot serve it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import HOST, Fleet, Pair, Server, ServerOptions, wait_ready
from cpu_serving.traffic import make_requests, send_all

from bootstrap_server import (
    BootstrapServer,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankLease,
    RankRecord,
    Topology,
)
from sglang_mooncake.messages import PROTOCOL_VERSION

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

BOUND_S = 180.0
rooms = itertools.count(1 << 42)


@pytest.fixture(scope="module")
def decode(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Fleet(tmp_path_factory.mktemp("registry"), nursery) as fleet:
        server = fleet.server("decode", ServerOptions(make_model("llama")))
        wait_ready([server])
        yield server


def error_with(decode: Server, topology: Topology, protocol: int) -> str:
    """What a request gets whose prefill instance has registered its first rank alone."""
    config = InstanceConfig(topology, KVFormat(1, "float32"), protocol=protocol)
    rank = Rank(RankCoords(0, 0, 0, 0), HOST, 9, epoch=1)
    # The lease holds although nobody may be run to renew it.
    with BootstrapServer(host=HOST, port=0, lease_s=600.0) as registry:
        where = {"bootstrap_host": HOST, "bootstrap_port": registry.port}
        request = replace(make_requests(1, 50)[0], fields={**where, "bootstrap_room": next(rooms)})
        with RankLease(f"{HOST}:{registry.port}", RankRecord(config, rank)):
            (answer,) = send_all(decode.url, [request], 1, timeout_s=BOUND_S)
    assert leaked_pages(decode) == 0
    assert answer.error is not None
    return answer.error


def test_a_rank_that_never_registers_is_named(decode: Server) -> None:
    error = error_with(decode, Topology(1, 1, 2, 1), PROTOCOL_VERSION)
    assert "1 of 2 ranks have registered, missing (dp 0 cp 0 tp 1 pp 0)" in error


def test_another_protocol_version_is_refused_with_both(decode: Server) -> None:
    error = error_with(decode, Topology(1, 1, 1, 1), PROTOCOL_VERSION + 41)
    assert f"protocol is {PROTOCOL_VERSION + 41} on prefill and {PROTOCOL_VERSION}" in error


def test_a_rank_where_nobody_answers_is_named(decode: Server) -> None:
    error = error_with(decode, Topology(1, 1, 1, 1), PROTOCOL_VERSION)
    assert f"prefill rank (dp 0 cp 0 tp 0 pp 0) at {HOST}:9" in error


def test_a_registry_of_its_own_outlives_the_server_that_it_shows(
    nursery: Nursery, decode: Server, tmp_path: Path
) -> None:
    with (
        BootstrapServer(host=HOST, port=0) as registry,
        Fleet(tmp_path, nursery) as fleet,
    ):
        beside = {"SGLANG_MOONCAKE_REGISTRY": f"{HOST}:{registry.port}"}
        prefill = fleet.server("prefill", ServerOptions(make_model("llama"), extra_env=beside))
        router = fleet.router(prefill, decode)
        Pair(prefill, decode, router).wait_ready()
        (answer,) = send_all(router.url, make_requests(1, 50), 1, timeout_s=BOUND_S)
        assert answer.error is None
        (shown,) = ranks_shown(registry)
        assert shown["lost_s"] is None
        prefill.process.kill()
        deadline_s = time.monotonic() + BOUND_S
        while ranks_shown(registry)[0]["lost_s"] is None:
            assert time.monotonic() < deadline_s, "its death is not shown"
            time.sleep(0.1)


def test_a_registry_of_its_own_shows_how_a_decode_server_dies(
    nursery: Nursery, tmp_path: Path
) -> None:
    with (
        BootstrapServer(host=HOST, port=0) as registry,
        Fleet(tmp_path, nursery) as fleet,
    ):
        beside = {"SGLANG_MOONCAKE_REGISTRY": f"{HOST}:{registry.port}"}
        options = ServerOptions(make_model("llama"), extra_env=beside)
        prefill, decode = fleet.server("prefill", options), fleet.server("decode", options)
        router = fleet.router(prefill, decode)
        Pair(prefill, decode, router).wait_ready()
        (answer,) = send_all(router.url, make_requests(1, 50), 1, timeout_s=BOUND_S)
        assert answer.error is None
        # Both sides tell of the room that has ended.
        shown = shown_once(registry, lambda shown: sorted(rooms_done(shown)) == [1, 1])
        assert {one["role"] for one in shown["instances"]} == {"prefill", "decode"}
        decode.process.kill()
        shown = shown_once(registry, lambda shown: shown["gone"])
        (gone,) = shown["gone"]
        assert (gone["role"], gone["rooms"]["done"]) == ("decode", 1)
        whats = [one["what"] for one in shown["events"] if one["instance"] == gone["instance"]]
        assert whats == ["lease lapsed", "connection lost", "registered"]
        (left,) = shown["instances"]
        assert left["role"] == "prefill"


def shown_once(
    registry: BootstrapServer, condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """What the page shows, once it is so."""
    deadline_s = time.monotonic() + BOUND_S
    while True:
        url = f"http://{HOST}:{registry.port}/v1/status"
        shown: dict[str, Any] = requests.get(url, timeout=60).json()
        if condition(shown):
            return shown
        assert time.monotonic() < deadline_s, f"never shown: {shown}"
        time.sleep(0.1)


def rooms_done(shown: dict[str, Any]) -> list[int]:
    """Of each rank that has reported."""
    return [report[3]["rooms"]["done"] for report in shown["reports"]]


def ranks_shown(registry: BootstrapServer) -> list[dict[str, Any]]:
    status = requests.get(f"http://{HOST}:{registry.port}/v1/status", timeout=60).json()
    return [rank for instance in status["instances"] for rank in instance["ranks"]]
