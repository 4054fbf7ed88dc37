# SPDX-License-Identifier: Apache-2.0
"""Decode ranks at the registries that their server names."""

from __future__ import annotations

from contextlib import ExitStack, closing

import requests
from handover import NEVER_S, make_context, until

from bootstrap_server import BootstrapServer, RankCoords, RankStatus, Topology
from sglang_mooncake.context import Deadlines
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.presence import presence_leases

TWO = Topology(1, 1, 2, 1)
NOBODY = "127.0.0.1:9"


def leases(*registries: str, tp: int = 0):
    return presence_leases(
        make_context("decode", "", Deadlines(), topology=TWO, coords=RankCoords(0, 0, tp, 0)),
        Config(registry=registries),
        "10.0.0.9:30001",
        30_001,
        7,
        lambda: lambda: RankStatus(rooms={"done": 4}),
    )


def servers(registry: BootstrapServer):
    """What its page shows."""
    url = f"http://127.0.0.1:{registry.port}/v1/status"
    return requests.get(url, timeout=30).json()["instances"]


def test_every_registry_shows_the_rank_whatever_others_do():
    with (
        ExitStack() as undo,
        BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S) as one,
        BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S) as other,
    ):
        addresses = [f"127.0.0.1:{registry.port}" for registry in (one, other)]
        made = leases(NOBODY, *addresses)
        for lease in made:
            undo.enter_context(closing(lease))
        for registry in (one, other):
            until(lambda registry=registry: servers(registry), "the rank is shown")
            (server,) = servers(registry)
            assert (server["role"], server["name"]) == ("decode", "decode 10.0.0.9-30001")
            assert (server["registered"], server["expected"]) == (1, 2)
            assert server["missing"] == [[0, 0, 1, 0]]
            (rank,) = server["ranks"]
            assert (rank["port"], rank["started_s"]) == (30_001, 7e-9)


def test_a_server_that_names_no_registry_tells_none():
    assert leases() == []
