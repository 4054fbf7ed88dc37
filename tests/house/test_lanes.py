# SPDX-License-Identifier: Apache-2.0
"""scripts/test runs lanes side by side, shows all of each, and ends them when it is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from testrun.lanes import LAST_BYTES, LAST_LINES, Lane, Result, Step, run_lanes

SCRIPTS = Path(__file__).parents[2] / "scripts"


def sh(name: str, script: str) -> Step:
    return Step(name, ["/bin/sh", "-c", script])


def codes(results: Sequence[Result]) -> list[int | None]:
    return [one.code for one in results]


def waits_for(path: Path) -> str:
    return f"while [ ! -e {path} ]; do sleep 0.05; done"


def test_lanes_run_side_by_side_and_steps_in_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Either lane waits for the other; were one the first they would never end."""
    here, there = tmp_path / "here", tmp_path / "there"
    one = [sh("a", f"touch {here}; {waits_for(there)}; echo a wrote"), sh("b", "echo b wrote >&2")]
    other = [sh("c", f"{waits_for(here)}; touch {there}; echo c wrote")]
    results = run_lanes([Lane("one", one), Lane("other", other)], tmp_path)
    assert [(one.lane, one.step, one.code, one.is_good) for one in results] == [
        ("one", "a", 0, True),
        ("one", "b", 0, True),
        ("other", "c", 0, True),
    ]
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
    assert codes(run_lanes(lanes, tmp_path)) == [0, 0]
    shown = [line.split()[0] for line in capfd.readouterr().out.splitlines() if line]
    turns = [a for a, b in zip(shown, [None, *shown], strict=False) if a != b]
    assert turns.count("one") == turns.count("other") == 1


def test_a_failure_stops_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    failed = tmp_path / "failed"
    lanes = [
        Lane(
            "fails", [sh("short", "exit 7"), sh("worse", "exit 8"), sh("next", f"touch {failed}")]
        ),
        Lane("lasts", [sh("long", waits_for(failed)), sh("after", "echo after wrote")]),
    ]
    assert codes(run_lanes(lanes, tmp_path)) == [7, 8, 0, 0, 0]
    shown = capfd.readouterr().out
    assert "lane fails: short: FAILED with exit status 7" in shown
    assert "lane fails: worse: FAILED with exit status 8" in shown
    assert "lane fails: next: ok" in shown
    assert "lane lasts: after: ok" in shown
    assert "after wrote" in shown


def test_of_a_step_that_failed_the_last_lines_are_kept(tmp_path: Path) -> None:
    steps = [
        sh("good", "echo fine"),
        sh("bad", f"seq {LAST_LINES + 100}; exit 1"),
        sh("large", f"head -c {LAST_BYTES * 2} /dev/zero | tr '\\0' x; exit 1"),
        sh("short", "printf '\\377 no end'; exit 1"),
        Step("missing", [str(tmp_path / "none")]),
    ]
    good, bad, large, short, missing = run_lanes([Lane("one", steps)], tmp_path)
    assert good.last_words == ""
    assert bad.last_words.splitlines() == [str(101 + line) for line in range(LAST_LINES)]
    assert large.last_words == "x" * LAST_BYTES
    assert short.last_words == "\ufffd no end"
    assert "cannot be run: " in missing.last_words


def test_exit_statuses_that_are_good_are_no_failure(tmp_path: Path) -> None:
    none_chosen = Step("none", ["/bin/sh", "-c", "exit 5"], good=frozenset({0, 5}))
    (result,) = run_lanes([Lane("one", [none_chosen])], tmp_path)
    assert (result.code, result.is_good) == (5, True)


def test_a_command_that_is_not_there_fails_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (result,) = run_lanes([Lane("one", [Step("gone", ["/no/such/command"])])], tmp_path)
    assert not result.is_good
    assert "/no/such/command" in capfd.readouterr().out


def test_what_needs_a_step_that_failed_is_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lanes = [
        Lane("one", [Step("set-up", ["/bin/false"], is_needed=True), sh("tests", "exit 0")]),
        Lane("other", [Step("set-up", ["/bin/true"], is_needed=True), sh("tests", "exit 0")]),
    ]
    results = run_lanes(lanes, tmp_path)
    assert codes(results) == [1, None, 0, 0]
    assert [one.is_good for one in results] == [False, False, True, True]
    assert "lane one: tests: left out" in capfd.readouterr().out


def test_shared_steps_are_for_whoever_is_done_first(tmp_path: Path) -> None:
    last = tmp_path / "last"
    lanes = [Lane("long", [sh("own", waits_for(last))]), Lane("short", [sh("own", "exit 0")])]
    results = run_lanes(lanes, tmp_path, [sh("a", "exit 3"), sh("b", f"touch {last}")])
    assert [(one.lane, one.step, one.code) for one in results] == [
        ("long", "own", 0),
        ("short", "own", 0),
        ("short", "a", 3),
        ("short", "b", 0),
    ]


def test_shared_steps_are_left_out_where_no_lane_could_be_set_up(tmp_path: Path) -> None:
    lanes = [Lane("one", [Step("set-up", ["/bin/false"], is_needed=True)])]
    results = run_lanes(lanes, tmp_path, [sh("a", f"touch {tmp_path}/never")])
    assert [(one.lane, one.step, one.code, one.is_good) for one in results] == [
        ("one", "set-up", 1, False),
        ("any", "a", None, False),
    ]
    assert not (tmp_path / "never").exists()


@pytest.mark.slow
def test_processor_time_is_that_of_the_step_and_of_what_it_waited_for(tmp_path: Path) -> None:
    turns = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done"
    lanes = [Lane("one", [sh("idle", "exit 0"), sh("busy", f"/bin/sh -c '{turns}'; exit 0")])]
    idle, busy = run_lanes(lanes, tmp_path)
    assert busy.cpu_s > idle.cpu_s


RUN = """
import sys
from pathlib import Path
import testrun.lanes
from testrun.lanes import Lane, Step, run_lanes
testrun.lanes.GRACE_S = float(sys.argv[1])
directory, script = Path(sys.argv[2]), sys.argv[3]
steps = {name: Step("long", ["/bin/sh", "-c", script, directory / name]) for name in "ab"}
after = Step("after", ["/bin/sh", "-c", f"touch {directory}/never"])
run_lanes([Lane(name, [step, after]) for name, step in steps.items()], directory)
"""


def stopped(directory: Path, grace_s: float, script: str, number: int) -> list[Path]:
    """Two lanes of the script, which writes a process's number into file $0, once the run has got
    a signal and has ended; the files."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(grace_s), str(directory), script],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    files = [directory / name for name in "ab"]
    try:
        wait_until(lambda: all(file.exists() and file.read_text().strip() for file in files))
        process.send_signal(number)
        said, error = process.communicate(timeout=100)
    finally:
        process.kill()  # Else it is a later test's that goes on.
        process.communicate()
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert said.count("after: left out") == 4, "when it ends, and below the lane's output"
    assert said.count(" has begun") == (2 if "has begun" in script else 0)
    assert not (directory / "never").exists()
    return files


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_run_interrupts_every_lane(tmp_path: Path, number: signal.Signals) -> None:
    polite = "trap 'touch $0.ended; exit 130' INT; echo $$ >$0; while :; do sleep 0.05; done"
    for file in stopped(tmp_path, 30, f"echo $0 has begun; {polite}", number):
        assert file.with_name(f"{file.name}.ended").exists()
        wait_until(lambda file=file: not is_alive(int(file.read_text())))


OTHERS = """
import signal
import threading
from pathlib import Path
import sys
import testrun.lanes
from testrun.lanes import Lane, Step, run_lanes
say = testrun.lanes._say
def interrupted(line):
    say(line)
    if line.endswith("..."):
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
testrun.lanes._say = interrupted
run_lanes([Lane("a", [Step("long", ["/bin/sleep", "1000"])])], Path(sys.argv[1]))
"""


def test_a_signal_that_does_not_end_a_wait_is_heard(tmp_path: Path) -> None:
    """As another thread gets it. One that comes just before the wait begins ends none, either."""
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "KeyboardInterrupt" in done.stderr


def test_what_does_not_end_is_killed_with_all_of_its_group(tmp_path: Path) -> None:
    stubborn = "trap '' INT TERM; sleep 1000 & echo $! >$0; while :; do sleep 0.05; done"
    for file in stopped(tmp_path, 0.2, stubborn, signal.SIGTERM):
        wait_until(lambda file=file: not is_alive(int(file.read_text())))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
