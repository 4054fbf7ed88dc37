# SPDX-License-Identifier: Apache-2.0
"""Routers tell a registry of themselves, and its status page shows them."""

from __future__ import annotations

import msgspec
import pytest
import requests
from bootstrap_http import url
from bootstrap_status import ROUTER, ask
from bootstrap_waits import WAIT_S

from bootstrap_server import BootstrapClient, BootstrapServer, NeverServed
from bootstrap_server.page import routers
from bootstrap_server.page.heard import KEPT_S
from bootstrap_server.page.routers import RoutersLately
from bootstrap_server.ranks.router_report import RouterReport

OURS, THEIRS = b"o" * 32, b"t" * 32


def at(port: int) -> RouterReport:
    return msgspec.structs.replace(ROUTER, port=port)


def test_the_last_that_a_router_told_is_kept_for_a_while() -> None:
    known = RoutersLately()
    known.told("b", at(1), 0.0)
    known.told("a", at(2), 1.0)
    known.told("b", at(1), 2.0)
    assert [(one.address, one.last_s) for one in known.lately(3.0)] == [("a", 1.0), ("b", 2.0)]
    assert [one.address for one in known.lately(1.0 + KEPT_S)] == ["b"]
    assert known.lately(2.0 + KEPT_S) == ()


def test_of_too_many_routers_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "ROUTERS_MAX", 2)
    known = RoutersLately()
    for port in (1, 2, 1, 3):
        known.told("a", at(port), 0.0)
    assert [one.report.port for one in known.lately(0.0)] == [1, 3]


def test_a_router_is_shown_by_where_it_is() -> None:
    with BootstrapServer("127.0.0.1", 0) as server:
        revision = ask(server)["revision"]
        with BootstrapClient(f"127.0.0.1:{server.port}", timeout_s=WAIT_S) as client:
            assert client.report_router(ROUTER)
        status = ask(server, revision, 5)
    (shown,) = status["routers"]
    assert shown.pop("last_s") <= status["now_s"]
    assert shown == {"address": "127.0.0.1", **msgspec.to_builtins(ROUTER)}


@pytest.mark.parametrize("bad", [{"requests": -1}, {"port": 70_000}, {"version": "x" * 65}])
def test_what_is_no_report_is_refused(bad: dict[str, object]) -> None:
    with BootstrapServer("127.0.0.1", 0) as server:
        body = {**msgspec.to_builtins(ROUTER), **bad}
        answer = requests.put(url(server, "/v1/routers"), json=body, timeout=WAIT_S)
        assert (answer.status_code, ask(server)["routers"]) == (400, [])


def test_a_router_proves_the_secret() -> None:
    with BootstrapServer("127.0.0.1", 0, keys=[OURS]) as server:
        address = f"127.0.0.1:{server.port}"
        with (
            BootstrapClient(address, timeout_s=WAIT_S, keys=[THEIRS]) as stranger,
            pytest.raises(NeverServed),
        ):
            stranger.report_router(ROUTER)
        with BootstrapClient(address, timeout_s=WAIT_S, keys=[OURS]) as router:
            assert router.report_router(ROUTER)
