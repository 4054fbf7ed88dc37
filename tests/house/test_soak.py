# SPDX-License-Identifier: Apache-2.0
"""scripts/soak: what is asked for, how requests have ended, and what the table says of it."""

from __future__ import annotations

import pytest
from cpu_serving.store_figures import Figures, total
from cpu_serving.traffic import Answer
from soak_run.options import SCENARIOS, parse
from soak_run.results import Asked, Probed, Row, Span, as_json, ends, table

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
    ("words", "said"),
    [
        (["--scenario", "fire"], "'fire' is none of lora, "),
        (["--minutes", "0"], "'0' is not a positive number"),
        (["--clients", "0"], "--clients 0 is not from 1 to 32"),
        (["--seed", "-1"], "--seed -1 is negative"),
    ],
)
def test_a_wrong_word_is_named(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


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
            asked(4.0, 6.0, (), unavailable),
            asked(1.0, 2.0, (), "HTTP 500: no"),
            Asked(0, 1.0, 61.0, None),
        ],
        KNOWN,
        SPANS,
        cuts=[Span("", 5.0, 8.0)],
    )
    assert found == ["503", "cut off", "failed", "hangs"]


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
