# SPDX-License-Identifier: Apache-2.0
"""The status page names servers that were not served lately, and why."""

from __future__ import annotations

from typing import Any

import pytest
import requests
from bootstrap_http import url
from bootstrap_waits import WAIT_S

from bootstrap_server import BootstrapClient, BootstrapServer, NeverServed
from bootstrap_server.page.heard import KEPT_S
from bootstrap_server.page.turned_away import (
    TURNED_AWAY_MAX,
    WHY_CHARS_MAX,
    TurnedAway,
    TurnedAwayLately,
)

OURS, THEIRS = b"o" * 32, b"t" * 32
REASON = "decode rank (dp 0) at 10.0.0.2: page_size is 16 on prefill and 1 on decode"


def shown(server: BootstrapServer) -> list[dict[str, Any]]:
    answer = requests.get(url(server, "/v1/status"), timeout=WAIT_S)
    return [
        {k: one[k] for k in ("address", "why", "times")} for one in answer.json()["turned_away"]
    ]


def give_up(server: BootstrapServer, *keys: bytes) -> None:
    with BootstrapClient(f"127.0.0.1:{server.port}", timeout_s=WAIT_S, keys=keys) as client:
        client.give_up([1, 2], REASON)


def test_a_server_with_another_secret_is_shown() -> None:
    with BootstrapServer("127.0.0.1", 0, keys=[OURS]) as server:
        with (
            BootstrapClient(f"127.0.0.1:{server.port}", timeout_s=WAIT_S, keys=[THEIRS]) as client,
            pytest.raises(NeverServed),
        ):
            client.instances()
        (one,) = shown(server)
    assert (one["address"], one["times"]) == ("127.0.0.1", 1)
    assert "another secret" in one["why"]


@pytest.mark.parametrize("keys", [(), (OURS,)], ids=["open", "secret"])
def test_a_server_that_gave_requests_up_is_shown_with_its_reason(keys: tuple[bytes, ...]) -> None:
    with BootstrapServer("127.0.0.1", 0, keys=keys) as server:
        give_up(server, *keys)
        give_up(server, *keys)
        assert shown(server) == [{"address": "127.0.0.1", "why": REASON, "times": 4}]


def test_what_strangers_say_is_not_shown() -> None:
    with BootstrapServer("127.0.0.1", 0, keys=[OURS]) as server:
        give_up(server)
        (one,) = shown(server)
    assert "does not prove our secret" in one["why"]
    assert "decode rank" not in one["why"]


def test_a_notice_with_a_wrong_proof_is_not_taken() -> None:
    with BootstrapServer("127.0.0.1", 0, keys=[OURS]) as server:
        with pytest.raises(NeverServed):
            give_up(server, THEIRS)
        with BootstrapClient(f"127.0.0.1:{server.port}", WAIT_S, keys=[OURS]) as client:
            assert client.given_up(0, 0.0).rooms == {}


def test_the_latest_are_kept_for_a_while() -> None:
    table = TurnedAwayLately()
    for number in range(TURNED_AWAY_MAX + 1):
        table.note(f"10.0.0.{number}", "no", float(number))
    assert len(table.lately(0.0)) == TURNED_AWAY_MAX
    table.note("10.0.0.1", "no", 100.0, 2)
    first, *_, last = table.lately(100.0)
    assert first == TurnedAway("10.0.0.1", "no", 3, 100.0)
    assert last.address == "10.0.0.2"
    assert table.lately(100.0 + KEPT_S) == ()


def test_text_is_cut_and_printable() -> None:
    table = TurnedAwayLately()
    table.note("10.0.0.1", "\x1b[2J" + "x" * 10_000, 0.0)
    (one,) = table.lately(0.0)
    assert one.why.isprintable()
    assert len(one.why) <= WHY_CHARS_MAX
