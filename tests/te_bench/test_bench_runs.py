# SPDX-License-Identifier: Apache-2.0
"""te bench as its users run it: real processes, real engines, and contenders that misbehave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from te import cli

HERE = Path(__file__).parent
#: Less than the time-out of a test.
DEADLINE_S = 110.0
TINY = ("--blocks", "64", "--nbytes", "4096", "--transport", "tcp", "--rounds", "1")


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "te.cli", "bench", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        cwd=HERE.parents[1],
    )


def bench(*arguments: str) -> tuple[int, dict, str]:
    """Exit status, the object, stderr."""
    process = start(*arguments, "--json")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert out, err.decode()
    return process.returncode, json.loads(out), err.decode()


@pytest.mark.slow
@pytest.mark.by_turns
def test_te_and_a_floor_through_the_command_line():
    status, result, err = bench(
        *("--shape", "kv", "--count-scale", "0.01", "--rounds", "2"),
        *("--transport", "tcp", "--peers", "floor", "--busy"),
    )
    assert status == 0, err
    assert (result["shape"], result["transport"], result["busy"]) == ("kv", "tcp", True)
    assert (result["blocks"], result["rounds"], result["ratio_of"]) == (39, 2, "gb_per_s")
    for family in ("te", "floor"):
        found = result["results"][family]
        assert found["verified"] is True
        assert 0 < found["gb_per_s"] <= found["best_gb_per_s"]
        assert 0 < found["p50_us"] <= found["p99_us"]
        assert found["cpu_s_per_gb"] > 0
    ratio = result["results"]["te"]["gb_per_s"] / result["results"]["floor"]["gb_per_s"]
    assert result["ratios"]["floor"] == pytest.approx(ratio)
    assert result["machine"]["cpus"] >= 1


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_memory_that_te_must_not_touch(transport):
    """Larger than a slot."""
    status, result, err = bench(
        *("--blocks", "64", "--nbytes", "73728", "--transport", transport, "--rounds", "2"),
        *("--peers", "te-staged"),
    )
    assert status == 0, err
    assert result["results"]["te-staged"]["verified"] is True
    assert result["ratios"]["te-staged"] > 0


FLOORS = ("tcp", "unix", "vmsplice", "vm_writev", "vm_readv", "mapped")


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize(
    "how",
    [
        ("--sync", "--floors", "all"),
        ("--floors", "tcp-2,vmsplice-2,vm_readv-2,mapped-2"),
    ],
)
def test_every_floor_moves_every_byte(how):
    status, result, err = bench(
        *("--blocks", "70", "--nbytes", "100", "--transport", "tcp", "--rounds", "1", *how),
        *("--peers", "floor"),
    )
    assert status == 0, err
    names = {name.split("-")[0] for name in result["variants"]}
    assert names <= {"te"} | {f"floor:{name}" for name in FLOORS}
    assert len(result["variants"]) >= 5
    assert {name: found["verified"] for name, found in result["variants"].items()} == dict.fromkeys(
        result["variants"], True
    )


@pytest.mark.slow
@pytest.mark.by_turns
def test_contenders_that_are_not_there_or_fail_stop_nobody():
    names = ("Dying", "Raising", "Missing", "Corrupting", "Straying")
    doubles = [f"bench_doubles:{name}" for name in names]
    status, result, _ = bench(*TINY, "--peers", ",".join(("mooncake", "nixl:Nothing", *doubles)))
    found = result["results"]
    assert status == 1  # for the damage alone: see the next test
    assert found["te"]["verified"] is True
    assert found["mooncake"]["state"] == "absent"
    assert "mooncake" in found["mooncake"]["reason"]
    assert found["nixl:Nothing"]["state"] == "absent"
    assert found["bench_doubles:Missing"]["reason"] == "libnothing.so is not installed"
    assert found["bench_doubles:Dying"]["state"] == "failed"
    assert (
        "ended with status 7; its last words: out of luck"
        in (found["bench_doubles:Dying"]["reason"])
    )
    assert "batch_transfer returned -1" in found["bench_doubles:Raising"]["reason"]
    assert found["bench_doubles:Corrupting"]["verified"] is False
    assert found["bench_doubles:Straying"]["verified"] is False
    assert "slots written by mistake" in found["bench_doubles:Straying"]["reason"]
    assert result["ratios"]["mooncake"] is None


@pytest.mark.slow
@pytest.mark.by_turns
def test_absent_peers_are_no_failure():
    status, result, _ = bench(*TINY, "--peers", "mooncake", "--peers-python", "/no/such/python")
    assert status == 0
    assert result["results"]["mooncake"]["state"] == "absent"
    assert "/no/such/python cannot be started" in result["results"]["mooncake"]["reason"]


@pytest.mark.slow
@pytest.mark.by_turns
def test_a_contender_that_hangs_is_given_up_at_the_deadline():
    """It is te's deadline, too, whose processes start late on a machine that has much to do."""
    status, result, _ = bench(*TINY, "--peers", "bench_doubles:Hanging", "--deadline", "30")
    assert status == 0
    reason = result["results"]["bench_doubles:Hanging"]["reason"]
    assert reason == "the source's transfer took more than 30 s"


@pytest.mark.slow
@pytest.mark.by_turns
def test_null_posts_hand_over_every_byte_and_land_every_transfer():
    """The engines and all their words are real, only the devices are not: no device is needed."""
    status, result, err = bench(
        *("--shape", "kv", "--count-scale", "0.05", "--rounds", "2"),
        *("--transport", "rdma", "--null-post"),
    )
    assert status == 0, err
    assert (result["shape"], result["blocks"], result["rails"]) == ("kv", 195, 4)
    # A work request for each block, and a mark for each MiB.
    assert result["requests"] == pytest.approx(1 + 73_728 / (1 << 20), rel=0.1)
    parts = [result[f"{name}_ns"] for name in ("describe", "submit", "post")]
    assert min(parts) > 0
    assert result["own_ns"] == pytest.approx(sum(parts))
    assert 0 < result["floor_ns"] < result["own_ns"]
    assert result["total_ns"] > result["describe_ns"] + result["submit_ns"]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.mark.slow
@pytest.mark.by_turns
def test_workers_end_with_the_runner_even_when_hung():
    process = start(*TINY, "--peers", "bench_doubles:Hanging")
    give_up_s = time.monotonic() + DEADLINE_S
    workers: list[int] = []
    while len(workers) < 4:  # te's pair and the hanging one
        assert time.monotonic() < give_up_s
        time.sleep(0.02)
        workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=DEADLINE_S)
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
        assert time.monotonic() < give_up_s, f"left behind: {workers}"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "kw"], "no shape 'kw'; there are kv,"),
        (["--blocks", "3"], "needs both --blocks and --nbytes"),
        (["--blocks", "0", "--nbytes", "1"], "blocks=0 must be between"),
        (["--blocks", "x"], "invalid int value"),
        (["--shape", "kv", "--blocks", "1", "--nbytes", "1"], "give either --shape"),
        (["--sync"], "go with --blocks and --nbytes"),
        (["--transport", "smoke"], "no transport 'smoke' to measure"),
        (["--memory", "cuda", "--peers", "floor"], "--peers floor is of host memory"),
        (["--peers", "device-copy"], "--peers device-copy goes with --memory cuda"),
        (["--memory", "gpu"], "--memory is one of any, engine, cuda"),
        (["--peers", "mooncake,redis"], "no peer 'redis'"),
        (["--peers", "te"], "no peer 'te'"),
        (["--floors", "tcp"], "no floor 'tcp'"),
        (["--rounds", "0"], "--rounds 0 must be between"),
        (["--seed", "-1"], "--seed -1 must be between"),
        (["--deadline", "0"], "--deadline 0 must be above 0"),
        (["--count-scale", "2"], "a scale of 2.0 must be"),
        (["--bars", "--busy"], "--bars brings its own"),
        (["--null-post"], "--null-post goes with --transport rdma"),
        (["--null-post", "--transport", "rdma", "--busy"], "leave out --busy"),
        (["--json", "--markdown"], "not allowed with"),
        (["--frobnicate"], "there is no option --frobnicate"),
    ],
)
def test_bad_arguments_are_answered_in_one_sentence(arguments, said, capsys):
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert said in err
    assert err.startswith("te")
    assert err.count("\n") == 1


def test_a_picture_needs_matplotlib_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("te_bench.plot.available", lambda: False)
    assert cli.main(["bench", "--plot", "x.png"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_engine_memory_that_te_lacks_is_said_before_anything_runs(monkeypatch, capsys):
    monkeypatch.setattr("te_bench.command.engine_memory_offered", lambda: False)
    assert cli.main(["bench", "--memory", "engine"]) == 2
    assert "needs te.allocate" in capsys.readouterr().err
