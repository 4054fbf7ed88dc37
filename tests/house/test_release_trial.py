# SPDX-License-Identifier: Apache-2.0
"""`scripts/sglang-releases`: its words, and its tables."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from release_trial import __main__ as program
from release_trial import trial
from release_trial.options import TrialOptions, parse
from release_trial.table import Row, chaos_counts, rows_of, table

JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
  <testcase name="test_tokens_are_equal[0.5.20-tp2-tp1]" time="12.3">
    <properties><property name="seen" value="all equal"/></properties>
  </testcase>
  <testcase name="test_prefill_killed_and_restarted[0.5.20]" time="40.0">
    <failure message="AssertionError: 1 page&#10;more">where it was</failure>
  </testcase>
  <testcase name="" time="0.0"/>
  <testcase name="test_tokens[0.5.20-DP attention]" time="0.0">
    <skipped type="pytest.skip" message="no GPU">where</skipped>
  </testcase>
  <testcase name="test_a_pair[0.5.20-0.5.23-prefill]" time="1.0">
    <error message="failed on setup with &quot;ServingError&quot;">where</error>
  </testcase>
</testsuite></testsuites>
"""
CHAOS = """\
   17898 answered, tokens equal, median 0.15 s, longest 19.78 s
    2678 left by their clients, median 0.12 s, longest 2.22 s
       0 answered, wrong tokens
       0 not ended by their deadline
asked after the fault and answered
"""


def test_the_words() -> None:
    assert parse(["0.5.22", "0.5.24rc1"]) == TrialOptions(("0.5.22", "0.5.24rc1"), 1.0)
    assert parse(["--pre", "--chaos", "3"]) == TrialOptions((), 3.0)
    assert parse(["0.5.15.post1", "--no-chaos"]) == TrialOptions(("0.5.15.post1",), None)


def test_the_rows_of_tests() -> None:
    assert rows_of(JUNIT, "0.5.20") == [
        Row("tokens are equal: tp2-tp1", True, 12.3, "all equal"),
        Row("prefill killed and restarted", False, 40.0, "AssertionError: 1 page"),
        Row("tokens: DP attention", None, 0.0, "left out: no GPU"),
        Row("a pair: 0.5.23-prefill", False, 1.0, 'failed on setup with "ServingError"'),
    ]


def test_how_requests_ended_in_chaos() -> None:
    assert chaos_counts(CHAOS) == (
        "17898 answered, tokens equal; 2678 left by their clients; 0 answered, wrong tokens; "
        "0 not ended by their deadline"
    )
    assert chaos_counts("chaos: there is no network") == ""


def test_the_table() -> None:
    rows = [Row("what our code uses", None, 2.0, "9 lacking"), *rows_of(JUNIT, "0.5.20")]
    assert table("0.5.20", rows, 55.6, 70.2).splitlines() == [
        "SGLang 0.5.20",
        "  result  seconds  what                          seen",
        "                2  what our code uses            9 lacking",
        "  ok           12  tokens are equal: tp2-tp1     all equal",
        "  FAILED       40  prefill killed and restarted  AssertionError: 1 page",
        "                0  tokens: DP attention          left out: no GPU",
        '  FAILED        1  a pair: 0.5.23-prefill        failed on setup with "ServingError"',
        "  2 failed, 56 s, 70 CPU-seconds",
    ]


class Commands:
    """Stands for `subprocess.run`: what a command says, and its exit status, by a word of it."""

    def __init__(self, **answers: tuple[str, int]) -> None:
        self.answers, self.seen = answers, list[tuple[list[str], dict[str, str]]]()

    def __call__(self, argv: Sequence[str], **given: Any) -> subprocess.CompletedProcess[str]:
        self.seen.append((list(argv), dict(given.get("env") or {})))
        said, code = next(
            (one for word, one in self.answers.items() if any(word in a for a in argv)), ("", 0)
        )
        for word in argv:
            if word.startswith("--junitxml="):
                Path(word.partition("=")[2]).write_text(JUNIT)
        if given.get("capture_output"):
            return subprocess.CompletedProcess(argv, code, said, "")
        given["stdout"].write(said)
        given["stdout"].flush()
        return subprocess.CompletedProcess(argv, code)


def test_a_release_is_tried_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(chaos_run=(CHAOS, 0), sglang_seam=("no this\n9 lacking\n", 1))
    monkeypatch.setattr(trial.subprocess, "run", commands)
    rows = trial.Trial("0.5.20", tmp_path / "0.5.20.log").rows(0.5)
    assert [(row.what, row.is_good) for row in rows] == [
        ("installed", True),
        ("what our code uses", None),
        ("what needs no server", True),
        ("tokens are equal: tp2-tp1", True),
        ("prefill killed and restarted", False),
        ("tokens: DP attention", None),
        ("a pair: 0.5.23-prefill", False),
        ("chaos for 0.5 min", True),
    ]
    with_it = [
        env.get("PYTHONPATH", "").startswith(str(trial.ROOT / "build/sglang/0.5.20"))
        for _, env in commands.seen
    ]
    assert with_it == [False, False, True, False, True], "servers get it from their nursery"


def test_what_cannot_be_installed_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = Commands(setup=("No matching distribution found\n", 1))
    monkeypatch.setattr(trial.subprocess, "run", commands)
    (row,) = trial.Trial("0.5.99", tmp_path / "0.5.99.log").rows(1.0)
    assert (row.is_good, row.seen) == (False, "No matching distribution found")


def test_the_newest_that_pip_finds_may_be_a_pre_release(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(index=("sglang (0.5.24rc1)\nAvailable versions: 0.5.24rc1, 0.5.23\n", 0))
    monkeypatch.setattr(program.subprocess, "run", commands)
    assert program.newest_of_pip() == "0.5.24rc1"
    monkeypatch.setattr(program.subprocess, "run", Commands())
    with pytest.raises(program.Unusable, match="no release"):
        program.newest_of_pip()


def test_the_exit_status_says_whether_anything_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {"0.5.20": [Row("one", True, 1.0)], "0.5.21": [Row("one", False, 1.0, "why")]}
    monkeypatch.setattr(program.Trial, "rows", lambda tried, _minutes: rows[tried.release])
    assert program.main(["0.5.20"]) == 0
    assert program.main(["0.5.20", "0.5.21"]) == 1
    said = capsys.readouterr().out
    assert said.count("SGLang 0.5.21") == 2, "all tables stand together at the end, too"
