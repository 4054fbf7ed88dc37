# SPDX-License-Identifier: Apache-2.0
"""scripts/soak: what is asked for, how requests have ended, and what the table says of it."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from cpu_serving.store_figures import Figures, total
from cpu_serving.traffic import Answer
from soak_run.attack import BEGINNINGS, MORE, Attack, strangers
from soak_run.loglines import NewLines, kinds, others
from soak_run.options import SCENARIOS, parse
from soak_run.results import (
    Asked,
    Probed,
    Row,
    Span,
    as_json,
    causes,
    end_of_waiting,
    ends,
    table,
)

HOST = "127.0.0.1"
BEFORE, AFTER = (1, 2), (3, 4)
KNOWN = [{"old": BEFORE, "new": AFTER}]
#: The change to the new weights took from 10 to 12.
SPANS = [Span("old", 0.0, 12.0), Span("new", 10.0)]


def asked(
    began_s: float, ended_s: float, tokens: tuple[int, ...], error: str | None = None
) -> Asked:
    return Asked(0, began_s, ended_s, Answer(tokens, error, ended_s - began_s))


def test_all_scenarios_for_five_minutes_unless_told_otherwise() -> None:
    assert parse([]).scenarios == tuple(SCENARIOS)
    assert parse([]).minutes == 5.0
    assert parse(["--scenario", "frozen,lora"]).scenarios == ("lora", "frozen")


@pytest.mark.parametrize(
    ("began_s", "ended_s", "old", "new"),
    [
        (1.0, 9.0, "equal", "wrong"),
        (9.0, 10.5, "equal", "equal"),
        (11.0, 11.5, "equal", "equal"),
        (11.0, 20.0, "equal", "equal"),
        (12.5, 13.0, "wrong", "equal"),
    ],
)
def test_an_answer_may_be_of_before_or_after_while_something_changes(
    began_s: float, ended_s: float, old: str, new: str
) -> None:
    found = ends(
        [asked(began_s, ended_s, BEFORE), asked(began_s, ended_s, AFTER)], KNOWN * 2, SPANS
    )
    assert found == [old, new]


def test_failures_are_told_apart() -> None:
    unavailable = "HTTP 503: External KV cache load failed"
    found = ends(
        [
            asked(1.0, 2.0, (), unavailable),
            asked(1.0, 2.0, (), "HTTP 500: no"),
            Asked(0, 1.0, 61.0, None),
        ],
        KNOWN,
        SPANS,
    )
    assert found == ["503", "failed", "hangs"]


def test_figures_of_ranks_are_added_and_the_worst_is_kept() -> None:
    found = total([Figures(loads=2, load_late_s=-1.0), Figures(loads=3, load_late_s=0.5)])
    assert (found.loads, found.load_late_s) == (5, 0.5)


def test_a_table_says_what_must_not_be() -> None:
    good = Row("lora", 300.0, ["equal"] * 7, Figures(pages=40), notes=["trained again twice"])
    assert table([good]).splitlines()[2:] == [
        "",
        "lora: trained again twice",
        "nothing that must not be",
    ]
    bad = Row(
        "frozen",
        60.0,
        ["equal", "cut off", "wrong", "503", "hangs"],
        Figures(load_late_s=0.25),
        Probed(put_late_s=0.09, wrong=2),
        errors=["HTTP 503: no"],
    )
    assert bad.bad() == [
        "frozen: 1 of 5 requests were answered with wrong tokens",
        "frozen: 1 of 5 requests were answered with HTTP 503",
        "frozen: 1 of 5 requests had not ended by their deadline",
        "frozen: 1 × HTTP 503: no",
        "frozen: 2 objects of the store have wrong bytes",
        "frozen: a get took 0.25 s beyond its deadline",
    ]
    assert not [one for one in bad.bad(late_max_s=1.0) if "deadline" in one and "get" in one]
    heads, *rows = (line.split("  ") for line in table([good, bad]).splitlines()[:3])
    assert len(heads) > 1
    assert len(rows) == 2
    assert as_json(bad)["cut off"] == 1


def test_a_scenario_in_which_nothing_was_answered_has_shown_nothing() -> None:
    assert Row("lora", 1.0, [], Figures()).bad() == ["lora: no request was answered"]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "wrong"),
        ("", "failed"),
        ("ServerDisconnectedError: Server disconnected", "failed"),
        ("TimeoutError: ", "failed"),
        ("HTTP 500: ''", "failed"),
        ("aborted", "failed"),
        ("KVTransferError(room=7): decode rank dp0 lost its prefill rank", "cut off"),
        ("HTTP 500: {'message': 'the connection to the prefill rank broke'}", "cut off"),
    ],
)
def test_a_request_whose_server_is_dead_must_fail_and_say_why(error: str | None, end: str) -> None:
    assert end_of_waiting(Answer((), error, 1.0)) == end
    assert end_of_waiting(None) == "hangs"


def test_causes_are_told_without_their_numbers() -> None:
    wrapped = (
        "HTTP 500: {'message': \"rank=3 with exception KVTransferError(room=7): lost rank 1\"}"
    )
    errors = (wrapped, "no memory", wrapped.replace("7", "8"), None)
    assert causes(Answer((), one, 1.0) for one in errors) == ["lost rank N", "no memory"]


def test_what_a_scenario_finds_itself_must_not_be() -> None:
    row = Row("kills", 60.0, ["equal"], Figures(), faults=["2 pages are left"], told_late_s=0.5)
    assert row.bad() == [
        "kills: a request failed 3.50 s after its server was killed",
        "kills: 2 pages are left",
    ]
    assert row.bad(late_max_s=1.0) == ["kills: 2 pages are left"]


def test_lines_that_come_anyway_are_nobodys() -> None:
    logs = {"a": "started\n", "b": "started\n"}
    lines = NewLines()
    assert lines.of(logs) == ["started", "started"]
    logs["a"] += "[09:00] 3 requests\n"
    ordinary = lines.of(logs)
    assert ordinary == ["[09:00] 3 requests"]
    logs["a"] += "[09:01] 14 requests\nstarted\n"
    logs["b"] += "refused 10.0.0.1\nrefused 10.0.0.2\n"
    found = others(ordinary, lines.of(logs))
    assert found == ["started", "refused 10.0.0.1", "refused 10.0.0.2"]
    assert kinds(found) == ["2 × refused N.N.N.N", "1 × started"]


@pytest.mark.slow
def test_strangers_talk_and_stay_at_every_port_and_leave_in_time() -> None:
    heard: dict[int, set[bytes]] = {}

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = heard.setdefault(writer.get_extra_info("sockname")[1], set())
        with contextlib.suppress(OSError):
            said.add(await reader.read(1 << 20))
        writer.close()

    async def meet() -> None:
        async with contextlib.AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(await asyncio.start_server(listen, HOST, 0))
                for _ in range(2)
            ]
            ports = [server.sockets[0].getsockname()[1] for server in servers]
            begins = set(BEGINNINGS.values()) - {b""}
            async with asyncio.timeout(100.0):
                # This process may be held for all of the time that one attack lasts.
                while not all(begins <= heard.get(port, set()) for port in ports):
                    spec = Attack(HOST, ports, 1, 1.0, staying=len(BEGINNINGS))
                    made = await strangers(spec)
            assert made.at_a_time <= len(ports) * len(BEGINNINGS)

    asyncio.run(meet())


@pytest.mark.slow
def test_all_that_strangers_say_can_be_said() -> None:
    rng = random.Random(1)
    for saying in MORE.values():
        assert len({saying(rng) for _ in range(30)}) > 1
