# SPDX-License-Identifier: Apache-2.0
"""Memory that SGLang gives back and takes again (`--enable-memory-saver`) while the other server
goes on, or is frozen. Meanwhile the pages of the KV pools are not there
(`tests/support/cpu_serving/shim/torch_memory_saver.py`): what would still reach for them fails."""

from __future__ import annotations

import psutil
import pytest
import requests
from cpu_serving.cuda import PretendedCuda, build_driver
from cpu_serving.expectations import Layout, Serving
from cpu_serving.pools import wait_idle
from cpu_serving.servers import Server
from cpu_serving.stats import read_stats
from cpu_serving.traffic import make_requests

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# Far beyond what is needed, far below forever.
BOUND_S = 60.0
SAVER = ("--enable-memory-saver",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.by_turns(name)) for name in ("host", "cuda")],
)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    cuda = None
    if request.param == "cuda":
        cuda = PretendedCuda(build_driver(tmp_path_factory.mktemp("driver")))
    return Layout.equal(f"release-{request.param}", page_size=16, extra_args=SAVER, cuda=cuda)


def change(server: Server, what: str) -> None:
    """Has a server release or resume its KV cache; it must answer although its peer may not."""
    url = f"{server.url}/{what}_memory_occupation"
    answer = requests.post(url, json={"tags": ["kv_cache"]}, timeout=BOUND_S)
    assert answer.status_code == 200, answer.text


def release_and_resume(server: Server) -> None:
    wait_idle(server)
    before = server.process.log_text().count("memory saver gave back")
    change(server, "release")
    assert server.process.log_text().count("memory saver gave back") == before + 1
    change(server, "resume")


def links(serving: Serving) -> set[object]:
    """The connections between the ranks of the two servers."""
    here, there = (
        psutil.Process(read_stats(server)[0].pid).net_connections("tcp")
        for server in (serving.pair.decode, serving.pair.prefill)
    )
    ends = {connection.laddr for connection in there}
    return {(c.laddr, c.raddr) for c in here if c.status == "ESTABLISHED" and c.raddr in ends}


def test_hand_overs_go_on_over_the_same_links(serving: Serving) -> None:
    serving.assert_equal(make_requests(6, 300, seed=61), concurrency=3)
    before = links(serving)
    assert before, "the ranks have no connection"
    for server in (serving.pair.decode, serving.pair.prefill):
        release_and_resume(server)
        serving.assert_equal(make_requests(6, 300, seed=62), concurrency=3)
    for server in (serving.pair.decode, serving.pair.prefill):
        wait_idle(server)
        change(server, "release")
    for server in (serving.pair.decode, serving.pair.prefill):
        change(server, "resume")
    serving.assert_equal(make_requests(6, 300, seed=63), concurrency=3)
    assert links(serving) == before


@pytest.mark.parametrize("frozen", ["prefill", "decode"])
def test_a_frozen_peer_keeps_nobody_from_it(serving: Serving, frozen: str) -> None:
    peers = {"prefill": serving.pair.prefill, "decode": serving.pair.decode}
    stuck = peers.pop(frozen)
    [server] = peers.values()
    serving.assert_equal(make_requests(4, 200, seed=64), concurrency=2)
    wait_idle(server)
    stuck.process.freeze()
    try:
        release_and_resume(server)
    finally:
        stuck.process.thaw()
    serving.assert_equal(make_requests(4, 200, seed=65), concurrency=2)
