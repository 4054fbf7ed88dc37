# SPDX-License-Identifier: Apache-2.0
"""scripts/nixl-beside: what its rows do to a pair of servers, which are none here.
tests/vllm/test_vllm_nixl.py has real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from cpu_serving.processes import ServingError
from cpu_serving.traffic import Answer, Request
from nixl_beside import pairs, servers
from nixl_beside.options import parse
from nixl_beside.rows import Answers, Served
from nixl_beside.servers import Clients, Known

REQUESTS = [Request((1, 2)), Request((1, 2, 3))]
ASKED = Known(REQUESTS, [Answer((len(one.input_ids),), None, 0.0) for one in REQUESTS])
OPTIONS = parse(["--requests", "4", "--patience", "60"])


class FakePair:
    """Answers right, and hands each prompt over. ``did``: what was done to it, in order."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.tokens, self.asked = 0.0, 0
        self.prefill = self.decode = self.process = self
        self.pid, self.url = 1, "http://here"
        self.is_handing_over = True

    def proxy(self) -> Any:
        return nullcontext(self)

    def answer(self, request: Request) -> Answer:
        self.asked += 1
        self.tokens += len(request.input_ids) * self.is_handing_over
        return Answer((len(request.input_ids),), None, 1.0)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.did.append(name)


def right(body: Any) -> Any:
    return {"choices": [{"token_ids": [len(body["prompt"])]}]}


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> FakePair:
    one = FakePair()
    for module in (pairs, servers):
        monkeypatch.setattr(module, "timed", lambda proxy, request: proxy.answer(request))
    monkeypatch.setattr(pairs, "imported_tokens", lambda server: server.tokens)
    monkeypatch.setattr(pairs, "sever", lambda *_: one.did.append("severed") or 2)
    monkeypatch.setattr(pairs, "ask_prefill", lambda url, body: {})
    monkeypatch.setattr(pairs, "ask_decode", lambda url, body, params: right(body))
    monkeypatch.setattr(pairs, "_STANDS_STILL_S", 0.0)
    monkeypatch.setattr(pairs, "_LOOK_S", 0.0)
    return one


def test_each_request_after_a_severing_is_looked_at(pair: FakePair) -> None:
    assert pairs.severed(pair, ASKED, OPTIONS) == Answers(12, 12, 0, 0, 1.0, came=12)
    assert pair.did == ["severed"] * 3
    pair.is_handing_over = False
    assert pairs.severed(pair, ASKED, OPTIONS).came == 0


def test_without_a_connection_nothing_is_severed(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "sever", lambda *_: 0)
    with pytest.raises(ServingError, match="no connection to sever"):
        pairs.severed(pair, ASKED, OPTIONS)


@pytest.mark.parametrize(
    ("name", "did"),
    [
        ("decode-stopped", ["freeze", "thaw"]),
        ("prefill-killed", ["kill", "again"]),
        ("decode-killed", ["kill", "again"]),
    ],
)
def test_after_a_fault_under_traffic_prompts_come_again(
    pair: FakePair, name: str, did: list[str]
) -> None:
    found = pairs.row(name, pair, ASKED, OPTIONS)
    assert isinstance(found, Answers)
    assert pair.did == did
    assert found.right == found.asked >= 4 * pairs.CLIENTS
    assert found.again_s is not None
    assert (found.meanwhile is not None) == ("kill" in did)
    assert found.meanwhile is None or found.meanwhile.is_right


def test_prompts_that_do_not_come_again_are_told(pair: FakePair) -> None:
    pair.is_handing_over = False
    options = parse(["--patience", "0.01"])
    found = pairs.row("decode-stopped", pair, ASKED, options)
    assert isinstance(found, Answers)
    assert (found.again_s, found.has_again) == (None, True)


@pytest.mark.parametrize("is_silent", [False, True])
def test_an_answer_is_waited_for_only_so_long(
    pair: FakePair, monkeypatch: pytest.MonkeyPatch, is_silent: bool
) -> None:
    goes_on = threading.Event()
    if not is_silent:
        goes_on.set()
    pair.thaw = goes_on.set  # type: ignore[method-assign,assignment]

    def answer(url: str, body: Any, params: Any) -> Any:
        assert goes_on.wait(60.0)
        return right(body)

    monkeypatch.setattr(pairs, "ask_decode", answer)
    options = parse(["--patience", "0.1" if is_silent else "60"])
    found = pairs.row("prefill-stopped", pair, ASKED, options)
    assert isinstance(found, Served)
    assert found.is_right
    assert (found.after_s is None) == is_silent
    assert found.compute_s == 1.0, "of an answer of the same server to the same prompt"


def test_nobody_begins_a_request_while_clients_rest(pair: FakePair) -> None:
    with Clients(pair, ASKED, 2) as clients:
        clients.wait(4, 60.0)
        with clients.resting(), pytest.raises(ServingError, match="have not had 5 answers"):
            clients.wait(5, 0.2)  # Each may have ended one, and begun another one.
        clients.wait(4, 60.0)
        with pytest.raises(ServingError, match="have not had 1000000000 answers"):
            clients.wait(10**9, 0.0)


def test_first_tokens_are_measured_in_turn_while_the_others_stand_still(pair: FakePair) -> None:
    other = FakePair()
    found = pairs.ttft({"te": pair, "nixl": other}, 2)
    assert [list(found[one].times_s) for one in ("te", "nixl")] == [[1.0, 1.0]] * 2
    assert pair.did == ["rest", *["go_on", "rest"] * 3, "go_on"]
    other.is_handing_over = False
    with pytest.raises(ServingError, match="nixl: no prompt was handed over"):
        pairs.ttft({"te": pair, "nixl": other}, 1)
