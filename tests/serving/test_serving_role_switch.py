# SPDX-License-Identifier: Apache-2.0
"""Role switch (--enable-pd-role-switch): a prefill server becomes a decode server and the other way
round, with the same memory and in the same processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from cpu_serving.expectations import Reference, Serving
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Pair, Server, ServerOptions, wait_ready
from cpu_serving.traffic import make_requests
from patient import patient

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

SWITCHABLE = (
    "--enable-pd-role-switch",
    # Each of what the demo gives to one role alone: either may have it.
    "--disable-overlap-schedule",
    "--disaggregation-decode-retraction-backup",
    "cpu_tensor",
)


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("switch"), nursery) as fleet:
        yield fleet


def switch(server: Server, role: str) -> None:
    body = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
    answer = requests.post(f"{server.url}/pd_role_switch", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    server.role = role  # type: ignore[assignment]


def test_two_servers_change_places_and_back(fleet: Fleet, reference: Reference) -> None:
    options = patient(ServerOptions(make_model("llama"), page_size=16, extra_args=SWITCHABLE))
    pair = fleet.pair(options, options)
    pair.wait_ready()
    first = Serving(pair, "llama", reference)
    first.assert_equal(make_requests(8, 300, seed=61), concurrency=4)
    first.assert_whole()

    switch(pair.prefill, "decode")
    switch(pair.decode, "prefill")
    turned = fleet.router(pair.decode, pair.prefill, name="router-turned")
    wait_ready([turned])
    second = Serving(Pair(pair.decode, pair.prefill, turned), "llama", reference)
    second.assert_equal(make_requests(8, 300, seed=62), concurrency=4)
    second.assert_whole()

    switch(pair.prefill, "prefill")
    switch(pair.decode, "decode")
    first.assert_equal(make_requests(8, 300, seed=63), concurrency=4)
    first.assert_whole()
