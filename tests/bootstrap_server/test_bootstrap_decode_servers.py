# SPDX-License-Identifier: Apache-2.0
"""Decode servers at a registry: on the page and in the metrics, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import requests
from bootstrap_http import url
from bootstrap_status import ask, ranks, report, until
from bootstrap_waits import NEVER_S, WAIT_S, patient_client

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    NotReady,
    RankCoords,
    RankLease,
    RankRecord,
    RankStatus,
    Topology,
)

MakeRecord = Callable[..., RankRecord]

ONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
KEY = b"k" * 32


def decode_client(address: str, name: str = "10.0.0.9-30001", **options: Any) -> BootstrapClient:
    return BootstrapClient(address, WAIT_S, instance=name, role="decode", **options)


def test_decode_ranks_are_shown_and_sent_to_nobody(
    server: BootstrapServer, make_record: MakeRecord
) -> None:
    address, two = f"127.0.0.1:{server.port}", Topology(1, 1, 2, 1)
    name = "10.0.0.9-30001"
    told = RankStatus(rooms={"open": 2, "done": 40, "failed": 0, "aborted": 9})
    make_client = partial(patient_client, role="decode")
    record = make_record(two, FIRST)
    with (
        BootstrapClient(address, WAIT_S, instance=name) as prefill,
        RankLease(
            address, record, instance=name, status=lambda: told, make_client=make_client
        ) as lease,
    ):
        lease.renew()
        status = until(server, report)
        (shown,) = status["instances"]
        assert (shown["role"], shown["name"]) == ("decode", f"decode {name}")
        assert (shown["registered"], shown["expected"]) == (1, 2)
        assert shown["missing"] == [[0, 0, 1, 0]]
        assert report(status) == told
        # A prefill server of the same name is another one.
        with pytest.raises(NotReady, match="none of its ranks"):
            prefill.instance()
        prefill.register(make_record(ONE, FIRST))
        assert len(prefill.instance().ranks) == 1
        listed = requests.get(url(server, "/v1/instances"), timeout=30).json()
        assert set(listed) == {"default", name}
        figures = requests.get(url(server, "/metrics"), timeout=30).text
        for line in ("ranks 1", "ranks_expected 1", "decode_ranks 1", "decode_ranks_expected 2"):
            assert f"\nsglang_mooncake_registry_{line}\n" in figures

    with decode_client(address) as client:
        assert client.instances() == {}
        client.register(make_record(ONE, FIRST, port=30_001))
        assert set(client.instances()) == {name}
        assert client.instance().ranks[0].port == 30_001
        client.release(client.instance().ranks[0])

    def shut_down(status: dict[str, Any]) -> list[str]:
        return [one["instance"] for one in status["events"] if one["what"] == "shut down"]

    status = until(server, shut_down)
    assert set(shut_down(status)) == {f"decode {name}"}
    assert status["gone"] == []


def test_a_decode_server_that_died_stays_on_the_page(make_record: MakeRecord) -> None:
    with BootstrapServer("127.0.0.1", 0, lease_s=0.5) as server:
        record = make_record(ONE, FIRST)
        with decode_client(f"127.0.0.1:{server.port}") as client:
            client.register(record)
            status = until(server, lambda status: status["gone"])
            (gone,) = status["gone"]
            assert status["instances"] == []
            assert gone["role"] == "decode"
            assert gone["instance"] == "decode 10.0.0.9-30001"
            assert (gone["coords"], gone["host"], gone["rooms"]) == (
                [0, 0, 0, 0],
                "127.0.0.1",
                None,
            )
            figures = requests.get(url(server, "/metrics"), timeout=30).text
            assert "\nsglang_mooncake_registry_ranks_gone 1\n" in figures
            client.register(record)
            came_back = until(server, lambda status: len(status["events"]) > 2)
            events = [event["what"] for event in reversed(came_back["events"])]
            assert events[:3] == ["registered", "lease lapsed", "registered"]


def test_a_decode_rank_proves_the_secret_as_others_do(make_record: MakeRecord) -> None:
    record = make_record(ONE, FIRST)
    with BootstrapServer("127.0.0.1", 0, lease_s=NEVER_S, keys=[KEY]) as server:
        address = f"127.0.0.1:{server.port}"
        with decode_client(address) as stranger, pytest.raises(BootstrapError, match="secret"):
            stranger.register(record)
        assert ranks(ask(server)) == []
        with decode_client(address, keys=[KEY]) as known:
            known.register(record)
            (rank,) = ranks(until(server, ranks))
        assert rank["coords"] == [0, 0, 0, 0]
