# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos --backend: one schedule for everyone, and what a run says of each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from chaos_run.backends import BACKENDS, STOCK, Backend
from chaos_run.compare import HUNG_S, header, is_cause, markdown, row
from chaos_run.options import parse
from chaos_run.report import as_json, text
from chaos_run.results import Happened, Result
from chaos_run.schedule import KINDS, SERVERS, SHARED, Fault, within
from chaos_run.traffic import End, Outcome, Way
from cpu_serving.traffic import Answer

ROOT = Path(__file__).parents[2]
WAY = "prefill-0 to decode-0"


def nobody(*_: object) -> Answer:
    raise AssertionError("nothing is asked here")


def result(*outcomes: Outcome, **changes: object) -> Result:
    fields = {"backend": "mooncake", "versions": "SGLang 1, engine 2", "happened": ()} | changes
    ways = (Way(WAY, frozenset(("prefill-0", "decode-0")), nobody),)
    return Result(3, 0.0, 90.0, ways, outcomes=outcomes, **fields)  # type: ignore[arg-type]


def outcome(took_s: float, end: End, error: str = "") -> Outcome:
    return Outcome(WAY, 1.0, 1.0 + took_s, end, error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_meets_the_same_faults(backend: Backend) -> None:
    options = parse(["--backend", backend, "--seed", "1", "--minutes", "5"])
    assert options.kinds == SHARED
    found = within(options.seed, options.kinds, options.minutes * 60)
    assert {fault.kind for fault in found} == set(SHARED)
    assert {fault.victim for fault in found} == set(SERVERS)
    assert not any(fault.alone for fault in found)
    assert found == within(1, SHARED, 300)
    assert sum(fault.gap_s + fault.lasts_s for fault in found) < 300


def test_more_time_has_the_same_faults_and_more() -> None:
    short, long = within(7, SHARED, 60), within(7, SHARED, 300)
    assert len(short) < len(long)
    assert long[: len(short)] == short


def test_our_own_run_has_all_kinds() -> None:
    assert parse([]).backend is None
    assert set(SHARED) < set(parse([]).kinds) < set(KINDS)


def test_a_row_counts_what_clients_met() -> None:
    cut, kill = Fault("cut", "decode-0", 1.0, 5.0), Fault("kill", "prefill-0", 1.0, 0.0)
    found = row(
        result(
            outcome(0.2, "equal"),
            outcome(HUNG_S + 1, "equal"),
            outcome(0.3, "wrong"),
            outcome(60.0, "late"),
            outcome(0.1, "left"),
            outcome(0.2, "failed", "KVTransferError: the decode rank at 10.79.0.13 is gone"),
            outcome(0.2, "failed", "HTTP 500: Internal Server Error"),
            happened=(
                Happened(cut, 2.0, 7.0, 0.5),
                Happened(cut, 20.0, 25.0, 60.0, lost="still fail", crashed=("decode-0",)),
                Happened(kill, 50.0, 60.0, 1.5),
            ),
            leaked_pages={"prefill-0": 3, "decode-0": 4},
            held={"decode-1": ["still has requests"]},
        )
    )
    assert (found.requests, found.answered, found.wrong, found.hung) == (6, 2, 1, 2)
    assert (found.with_cause, found.without_cause) == (1, 2)
    assert found.served_again_s == {"cut": [0.5, math.inf], "kill": [1.5]}
    assert (found.crashed, found.leaked_pages, found.stuck) == (1, 7, 1)
    line = markdown(found)
    assert "| 0.5, never × 1 |" in line
    assert line.endswith("| 1 | 7, 1 not idle |")
    assert {one.count("|") for one in (*header(), line)} == {line.count("|")}


@pytest.mark.parametrize(
    ("error", "says_why"),
    [
        ("", False),
        ("Aborted", False),
        ("HTTP 500: Internal Server Error", False),
        ("HTTP 500: {'error': {'message': 'the peer 10.0.0.1 is gone'}}", True),
        ("ServerDisconnectedError: Server disconnected", True),
    ],
)
def test_a_status_alone_is_no_cause(error: str, says_why: bool) -> None:
    assert is_cause(error) is says_why


def test_what_is_printed_says_who_and_what_was_left_out() -> None:
    found = result(outcome(0.2, "equal"))
    said = text(found)
    assert "backend mooncake: SGLang 1, engine 2" in said
    assert "MC_TRANSFER_TIMEOUT=5" in said
    assert "left out, as they do not mean the same for every backend: control-cut" in said
    assert markdown(row(found)) in said
    assert as_json(found)["backend"] == "mooncake"


def test_a_dead_fleet_does_not_fill_the_terminal() -> None:
    failed = [outcome(0.1, "failed", "refused") for _ in range(200)]
    assert "and 181 more" in text(result(*failed))


@pytest.mark.parametrize("backend", STOCK)
def test_each_other_engine_can_be_installed(backend: Backend) -> None:
    setup = (ROOT / "scripts/setup").read_text()
    assert all(f"{name}==" in setup for name in STOCK[backend].packages)
