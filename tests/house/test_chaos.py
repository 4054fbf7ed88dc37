# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos: what is asked for, which faults come, and what a run has shown."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chaos_run.options import parse
from chaos_run.report import as_json, svg, text
from chaos_run.resources import POOLED_THREADS, Held, grown
from chaos_run.results import AFTERMATH_S, Happened, Result, unexplained
from chaos_run.schedule import KINDS, SERVERS, Fault, faults
from chaos_run.traffic import End, Outcome, Way
from cpu_serving.traffic import Answer

FIRST, SECOND = "prefill-0 to decode-0", "prefill-1 to decode-1"


def nobody(*_: object) -> Answer:
    raise AssertionError("nothing is asked here")


WAYS = (
    Way(FIRST, frozenset(("prefill-0", "decode-0")), nobody),
    Way(SECOND, frozenset(("prefill-1", "decode-1")), nobody),
    Way("router", frozenset(), nobody),
)
#: From 10 to 15 s; served again at 17 s.
FROZEN = Happened(Fault("freeze", "prefill-0", 1.0, 5.0), 10.0, 15.0, 2.0)


def outcome(way: str, began_s: float, ended_s: float, end: End, error: str = "") -> Outcome:
    return Outcome(way, began_s, ended_s, end, error)


def result(*outcomes: Outcome, **changes: object) -> Result:
    answered = [outcome(way.name, 0.5, 1.0, "equal") for way in WAYS]
    fields = {"leaked_pages": {}, "held": {}} | changes
    return Result(3, 0.0, 40.0, WAYS, (*answered, *outcomes), (FROZEN,), **fields)  # type: ignore[arg-type]


def test_a_seed_says_which_faults_come() -> None:
    one, same = (list(islice(faults(5), 40)) for _ in range(2))
    assert one == same
    assert one != list(islice(faults(6), 40))


def test_each_kind_comes_once_before_any_comes_again() -> None:
    found = [fault.kind for fault in islice(faults(0), 3 * len(KINDS))]
    for begin in range(0, len(found), len(KINDS)):
        assert set(found[begin : begin + len(KINDS)]) == set(KINDS)


def test_each_server_has_its_turn() -> None:
    kills = [fault.victim for fault in islice(faults(1, ["kill"]), 8)]
    assert Counter(kills) == dict.fromkeys(SERVERS, 2)
    assert set(kills[:4]) == set(SERVERS)


def test_registries_are_on_prefill_servers() -> None:
    assert {fault.victim for fault in islice(faults(0, ["registry"]), 8)} == set(SERVERS[:2])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--minutes", "0"], "'0' is not a positive number"),
        (["--seed", "-1"], "--seed -1 is negative"),
        (["--kinds", "kill,flood"], "'flood' is none of kill, "),
        (["--clients", "0"], "--clients 0 is not from 1 to 64"),
        (["--aborts", "1"], "'1' is not a share"),
    ],
)
def test_bad_arguments_are_answered(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_arguments() -> None:
    options = parse(["--minutes", "10", "--kinds", "cut,kill", "--plot", "x.svg"])
    assert (options.minutes, options.kinds, options.plot) == (10, ("kill", "cut"), Path("x.svg"))


@pytest.mark.parametrize(
    ("way", "began_s", "ended_s", "explained"),
    [
        (FIRST, 9.0, 11.0, True),
        (FIRST, 14.0, 16.0, True),
        (FIRST, 15.0 + AFTERMATH_S, 36.0, True),
        (FIRST, 15.1 + AFTERMATH_S, 36.0, False),
        (FIRST, 8.0, 9.0, False),
        (SECOND, 11.0, 12.0, False),
        ("router", 11.0, 12.0, True),
        ("router", 8.0, 9.0, False),
    ],
)
def test_what_explains_a_failure(way: str, began_s: float, ended_s: float, explained: bool) -> None:
    failed = outcome(way, began_s, ended_s, "failed", "peer is gone")
    assert unexplained([failed], [FROZEN], WAYS) == ([] if explained else [failed])


def test_what_must_not_be() -> None:
    assert result().faults_found() == []
    bad = result(
        outcome(FIRST, 1.0, 2.0, "wrong"),
        outcome(FIRST, 1.0, 61.0, "late"),
        outcome(SECOND, 11.0, 12.0, "failed", "no reason that holds"),
        outcome(FIRST, 11.0, 12.0, "failed", " "),
        leaked_pages={"decode-1": 3, "decode-0": 0},
        held={"prefill-1": ["process 7: 12 threads, then 13"], "decode-0": []},
    ).faults_found()
    assert bad == [
        "1 requests answered with wrong tokens",
        "1 requests past its deadline",
        f"a request over {SECOND} failed, which no fault explains: no reason that holds",
        f"a request over {FIRST} failed without a cause",
        "decode-1: 3 pages leaked",
        "prefill-1: process 7: 12 threads, then 13",
    ]


def test_a_run_without_answers_is_bad() -> None:
    empty = Result(0, 0.0, 1.0, WAYS, (), ())
    assert empty.faults_found() == ["no request was answered"]


def test_rates_are_those_of_pairs_and_of_pairs_without_the_victim() -> None:
    # 33 quiet seconds of two pairs; 7 disturbed ones of the second pair.
    quiet = [outcome(FIRST, 20.0, 20.5, "equal")] * 64
    beside = [outcome(SECOND, 11.0, 12.0, "equal")] * 14
    victims = [outcome(FIRST, 11.0, 12.0, "equal")] * 5
    assert result(*quiet, *beside, *victims).rates() == (66 / 33 / 2, 14 / 7)


def test_causes_are_counted_without_their_numbers() -> None:
    failed = [
        outcome(FIRST, 11.0, 12.0, "failed", f"room {n} of {n:032x} timed out") for n in range(3)
    ]
    assert result(*failed).causes() == {"room N of N timed out": 3}


def test_only_what_processes_of_both_hold_more_is_said() -> None:
    before = {1: Held(10, Counter(socket=4, file=2)), 2: Held(3, Counter())}
    many = 11 + POOLED_THREADS
    after = {1: Held(many, Counter(socket=6, file=1)), 3: Held(99, Counter(socket=99))}
    assert grown(before, after) == [
        f"process 1: 10 threads, then {many}",
        "process 1: 4 descriptors of socket, then 6",
    ]
    assert grown(before, before) == []


def test_what_a_run_prints_writes_and_draws() -> None:
    failed = outcome(FIRST, 11.0, 12.0, "failed", "the peer <prefill-0> answers nothing")
    shown = result(failed)
    printed = text(shown)
    assert "10.0 s  freeze    prefill-0    5.0 s, served again 2.00 s later" in printed
    assert "1 failed with a cause" in printed
    assert "1 the peer <prefill-N> answers nothing" in printed
    assert printed.endswith("nothing that must not be")
    document = json.loads(json.dumps(as_json(shown)))
    assert document["bad"] == []
    assert document["faults"][0]["victim"] == "prefill-0"
    assert len(document["requests"]) == 4
    drawn = ElementTree.fromstring(svg(shown))
    titles = [one.text or "" for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert any("the peer <prefill-0> answers nothing" in title for title in titles)
