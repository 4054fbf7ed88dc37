# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos --kinds none: what it says of memory and latency over time."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from chaos_run.options import parse
from chaos_run.report import as_json, text
from chaos_run.resources import resident
from chaos_run.results import Result
from chaos_run.schedule import KINDS
from chaos_run.soak import ANSWERS_MIN, Sample, grows, thirds
from chaos_run.traffic import Outcome

MIB = 1 << 20


def samples(*megabytes: int) -> list[Sample]:
    """One a second."""
    return [Sample(at + 0.5, {"decode-0": n * MIB}) for at, n in enumerate(megabytes)]


def answers(*seconds: float) -> list[Outcome]:
    """Of each third of three seconds so many that each third has a p99."""
    return [
        Outcome("a", 0.0, third + 0.5, "equal") for third in range(3) for _ in range(ANSWERS_MIN)
    ] + [
        Outcome("a", third + 0.4 - took, third + 0.4, "equal") for third, took in enumerate(seconds)
    ]


def test_no_faults_can_be_asked_for() -> None:
    assert parse(["--kinds", "none"]).kinds == ()
    assert parse(["--secret"]).kinds == KINDS
    assert parse([]).kinds == tuple(kind for kind in KINDS if kind != "intruder")


def test_a_flat_run_is_told_in_thirds() -> None:
    found = thirds(0.0, 3.0, samples(100, 104, 103), answers())
    assert [one.nbytes["decode-0"] // MIB for one in found] == [100, 104, 103]
    assert [one.answers for one in found] == [ANSWERS_MIN] * 3
    assert [one.p50_s for one in found] == [0.5, 1.5, 2.5]


@pytest.mark.parametrize(("last", "is_bad"), [(105, False), (106, True)])
def test_memory_that_grows_is_named(last: int, is_bad: bool) -> None:
    found = [
        replace(one, p99_s=1.0) for one in thirds(0.0, 3.0, samples(100, 100, last), answers())
    ]
    bad = grows(found)
    assert bool(bad) is is_bad
    if is_bad:
        assert bad == ["decode-0: 100 MiB of memory in the first third of the run, 106 in the last"]


@pytest.mark.parametrize(("last_s", "is_bad"), [(1.5, False), (1.51, True)])
def test_answers_that_take_longer_and_longer_are_named(last_s: float, is_bad: bool) -> None:
    one, two, three = thirds(0.0, 3.0, samples(100, 100, 100), answers())
    found = [replace(one, p99_s=1.0), two, replace(three, p99_s=last_s)]
    assert bool(grows(found)) is is_bad


def test_of_too_little_nothing_is_said() -> None:
    assert thirds(0.0, 3.0, samples(100, 100), answers()) == []
    assert thirds(0.0, 3.0, samples(100, 100, 100), answers()[:ANSWERS_MIN]) == []
    assert "too little to tell" in grows([])[0]
    soak = Result(0, 0.0, 3.0, (), tuple(answers()), (), thirds=())
    assert any("too little to tell" in one for one in soak.faults_found())
    assert not replace(soak, thirds=None).faults_found()


def test_it_is_in_the_report_and_in_the_verdict() -> None:
    found = tuple(thirds(0.0, 3.0, samples(100, 100, 200), answers()))
    result = Result(0, 0.0, 3.0, (), tuple(answers()), (), thirds=found)
    assert any("200 in the last" in one for one in result.faults_found())
    assert "last third:" in text(result)
    assert len(as_json(result)["thirds"]) == 3
    assert "third" not in text(replace(result, thirds=None))


def test_memory_of_a_process_is_counted() -> None:
    assert resident(os.getpid()) > 10 * MIB
