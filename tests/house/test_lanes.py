# SPDX-License-Identifier: Apache-2.0
"""scripts/test runs lanes side by side, shows all of each, and ends the others when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from testrun.lanes import Lane, Step, run_lanes

SCRIPTS = Path(__file__).parents[2] / "scripts"


def sh(name: str, script: str) -> Step:
    return Step(name, ["/bin/sh", "-c", script])


def waits_for(path: Path) -> str:
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


def test_lanes_run_side_by_side_and_steps_in_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Either lane waits for the other; were one the first they would never end."""
    here, there = tmp_path / "here", tmp_path / "there"
    one = [sh("a", f"touch {here}; {waits_for(there)}; echo a wrote"), sh("b", "echo b wrote >&2")]
    other = [sh("c", f"{waits_for(here)}; touch {there}; echo c wrote")]
    assert run_lanes([Lane("one", one), Lane("other", other)], tmp_path) == 0
    shown = capfd.readouterr().out
    assert shown.index("a wrote") < shown.index("b wrote")
    assert "c wrote" in shown
    for said in ("lane one: a: ok after", "lane one: b: ok after", "lane other: c: ok after"):
        assert shown.count(said) == 2, "when it ends, and below the lane's output"


def test_a_lane_is_shown_in_one_piece(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lanes = [
        Lane(name, [sh(name, f"for i in $(seq 200); do echo {name} $i; done")])
        for name in ("one", "other")
    ]
    assert run_lanes(lanes, tmp_path) == 0
    shown = [line.split()[0] for line in capfd.readouterr().out.splitlines() if line]
    turns = [a for a, b in zip(shown, [None, *shown], strict=False) if a != b]
    assert turns.count("one") == turns.count("other") == 1


def test_a_failure_ends_the_other_lanes_as_by_an_interrupt(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, ended, never = tmp_path / "begun", tmp_path / "ended", tmp_path / "never"
    lasting = f"trap 'touch {ended}; exit 130' INT; touch {begun}; while :; do sleep 0.05; done"
    lanes = [
        Lane("fails", [sh("short", f"{waits_for(begun)}; exit 7"), sh("next", f"touch {never}")]),
        Lane("lasts", [sh("long", lasting), sh("after", f"touch {never}")]),
    ]
    assert run_lanes(lanes, tmp_path) == 7
    assert ended.exists()
    assert not never.exists()
    shown = capfd.readouterr().out
    assert "lane fails: short: FAILED with exit status 7" in shown
    assert "lane lasts: long: stopped" in shown
    assert "lane lasts: after: left out" in shown


def test_what_does_not_end_is_killed_with_all_of_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testrun.lanes.GRACE_S", 0.2)
    begun = tmp_path / "begun"
    stubborn = f"trap '' INT TERM; sleep 1000 & echo $! >{begun}.tmp; mv {begun}.tmp {begun}; wait"
    lanes = [
        Lane("fails", [sh("short", f"{waits_for(begun)}; exit 7")]),
        Lane("stays", [sh("long", f"{stubborn}; while :; do sleep 0.05; done")]),
    ]
    assert run_lanes(lanes, tmp_path) == 7
    wait_until(lambda: not is_alive(int(begun.read_text())))


def test_exit_statuses_that_are_good_are_no_failure(tmp_path: Path) -> None:
    none_chosen = Step("none", ["/bin/sh", "-c", "exit 5"], good=frozenset({0, 5}))
    assert run_lanes([Lane("one", [none_chosen])], tmp_path) == 0


def test_a_command_that_is_not_there_fails_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_lanes([Lane("one", [Step("gone", ["/no/such/command"])])], tmp_path) == 1
    assert "/no/such/command" in capfd.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_run_ends_every_lane(tmp_path: Path, number: signal.Signals) -> None:
    script = f"""
import sys
from pathlib import Path
from testrun.lanes import Lane, Step, run_lanes
steps = [Step("long", ["/bin/sh", "-c", "echo $$ >{tmp_path}/$0; sleep 1000", n]) for n in "ab"]
run_lanes([Lane(step.argv[-1], [step]) for step in steps], Path("{tmp_path}"))
"""
    env = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / name for name in "ab"]
    wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
    wait_until(lambda: not any(is_alive(int(file.read_text())) for file in files))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
