# SPDX-License-Identifier: Apache-2.0
"""What a registry's status page shows, as tests ask for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import requests
from bootstrap_http import url
from bootstrap_waits import WAIT_S

from bootstrap_server import BootstrapServer, RankStatus
from bootstrap_server.ranks.router_report import RouterReport, Wells

#: What a router tells of itself.
ROUTER = RouterReport(
    port=8000,
    version="1.2.3",
    requests=3,
    waiting=1,
    answered=10,
    refused=2,
    failed=1,
    prefill=Wells(2, 3),
    decode=Wells(1, 1),
    prompt_tokens=100,
    cached_tokens=60,
    expected_cached_tokens=70,
    error=0.25,
)


def ask(server: BootstrapServer, after: str = "0", wait_s: float = 0) -> dict[str, Any]:
    path = f"/v1/status?after={after}&wait_s={wait_s}"
    answer = requests.get(url(server, path), timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ranks(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [rank for instance in status["instances"] for rank in instance["ranks"]]


def report(status: dict[str, Any]) -> RankStatus | None:
    """That of the only rank."""
    for _, coords, revision, told in status["reports"]:
        assert (coords, revision) == (ranks(status)[0]["coords"], ranks(status)[0]["report"])
        return msgspec.convert(told, RankStatus)
    assert all(rank["report"] is None for rank in ranks(status))
    return None


def until(server: BootstrapServer, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first snapshot that is so."""
    deadline_s, status = time.monotonic() + WAIT_S, ask(server)
    while not condition(status):
        assert time.monotonic() < deadline_s, f"never happened: {status}"
        ask(server, status["revision"], 5)
        status = ask(server)
    return status
