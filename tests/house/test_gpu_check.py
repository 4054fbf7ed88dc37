# SPDX-License-Identifier: Apache-2.0
"""scripts/gpu-check on a driver without a GPU: what it checks is real, what it measures is not. And
what becomes of steps that hang, die or find something."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_serving.cuda import build_driver
from gpu_check import needs, runner
from gpu_check.build import BuildError, build
from gpu_check.command import main
from gpu_check.report import SCHEMA, Result, exit_status, verdicts
from gpu_check.steps import DRIVER, STEPS, Step, chosen
from te_far import wait_until
from te_gpu_python import gpu_python

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "tests" / "te" / "gpu_check_modules"
CAVEAT = "a driver without a GPU; the figures mean nothing"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("driver")
    return str(gpu_python(folder, build_driver(folder), modules=MODULES))


def run(
    python: str, folder: Path, *arguments: str, steps: Sequence[Step] = STEPS
) -> tuple[int, dict[str, Any]]:
    """The exit status, and the object."""
    file = folder / "found.json"
    argv = ["--te", str(ROOT), "--scale", "0.005", "--json", str(file), *arguments]
    status = main(argv, python=python, caveat=CAVEAT, steps=steps)
    found = json.loads(file.read_text())
    assert (found["schema"], found["exit_status"], found["caveat"]) == (SCHEMA, status, CAVEAT)
    return status, found["steps"]


def states(steps: dict[str, Any]) -> dict[str, str]:
    return {name: one["state"] for name, one in steps.items()}


@pytest.mark.slow
@pytest.mark.by_turns
def test_steps_run_and_pass(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patterns = "facts,kinds,copier,bytes-samehost,kills-tcp,pairs-samehost-cuda"
    status, found = run(python, tmp_path, "--only", patterns)
    out = capsys.readouterr().out
    assert set(states(found).values()) == {"passed"}, out
    assert (status, len(found)) == (0, 7)
    assert found["driver"]["found"]["name"] == "stand-in without a GPU"
    assert found["driver"]["found"]["gpu_direct_rdma_writes_ordering"] == 100
    assert found["driver"]["found"]["virtual_memory"] is None  # the driver does not tell
    assert found["kinds"]["found"]["pool"]["kind"] == "cuda:0"
    assert found["kinds"]["found"]["managed"] == "host"
    assert found["pairs-samehost-cuda"]["found"]["ratios"]["device-copy"] > 0
    assert f"[{CAVEAT}] kv, samehost, memory cuda" in out


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.parametrize(
    "patterns",
    [
        "bytes-tcp,allocations-*",
        "arrivals-*,cancels-*",
        "fences-*,kills-samehost,digests",
        "remaps-*",
    ],
)
def test_all_that_is_checked_holds(python: str, tmp_path: Path, patterns: str) -> None:
    status, found = run(python, tmp_path, "--only", patterns)
    assert (status, set(states(found).values())) == (0, {"passed"}), found


@pytest.mark.slow
@pytest.mark.by_turns
def test_the_steps_with_pytorch_run(python: str, tmp_path: Path) -> None:
    status, found = run(python, tmp_path, "--only", "torch-*")
    assert (status, set(states(found).values())) == (0, {"passed"}), found
    assert len(found) == 5


@pytest.mark.slow
@pytest.mark.by_turns
def test_without_pytorch_its_steps_say_so(tmp_path: Path) -> None:
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError\n")
    python = str(gpu_python(tmp_path, build_driver(tmp_path), modules=folder))
    status, found = run(python, tmp_path, "--only", "torch-graph-tcp")
    assert (status, found["torch-graph-tcp"]["state"]) == (0, "skipped")
    assert found["torch-graph-tcp"]["reason"] == "PyTorch is not installed"


@pytest.mark.slow
@pytest.mark.by_turns
def test_what_is_measured_is_there(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = run(python, tmp_path, "--only", "speed", "--peers", "mooncake,nixl")
    assert (status, set(states(found).values())) == (0, {"passed"}), found
    assert found["copies"]["found"]["D2H_4096_gb_per_s"]["batch"] > 0
    assert found["copies"]["found"]["D2D_256_gb_per_s"]["pageable_loop"] is None
    assert found["calls"]["found"]["event_query_us"]["p99"] > 0
    assert found["pairs-tcp-cuda"]["found"]["results"]["nixl"]["state"] == "absent"
    assert set(found["pairs-tcp-host-cuda"]["found"]["results"]) == {"te"}
    assert "GB/s within one process" in capsys.readouterr().out


def double(name: str, deadline_s: float = 60.0) -> Step:
    return Step(name, "correctness", f"gpu_check_doubles:{name}", deadline_s)


def has_ended(pid: int) -> bool:
    """Whether or not somebody has collected its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Nobody can wait for it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_process_that_cannot_be_killed_holds_nothing_up(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    real = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, _: groups.append(group))
    monkeypatch.setattr(runner, "KILL_WAIT_S", 0.2)
    settings = runner.Settings(python, ROOT, 1.0, "", python)
    result = runner.run_step(double("hang", 2.0), settings, 60.0)
    real(groups[0], signal.SIGKILL)
    assert result.state == "hung"
    assert result.reason.startswith(f"its process {groups[0]} cannot be killed; it was ")


@pytest.mark.slow
@pytest.mark.by_turns
def test_steps_that_hang_or_die_lose_no_other(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = next(one for one in STEPS if one.name == "machine")
    # Long enough for Python to start, though it is held for seconds: it has to say what it does.
    # Then the deadline is over.
    late_s = [0.0]

    def told(text: bytes) -> Any:
        found = json.loads(text)
        late_s[0] += 30.0 * ("beside" in str(found.get("doing")))
        return found

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(runner, "json", SimpleNamespace(dumps=json.dumps, loads=told))
    steps = (DRIVER, double("hang", 30.0), double("die"), double("break_the_context"), last)
    status, found = run(python, tmp_path, steps=steps)
    assert status == 1
    assert states(found) == {
        "driver": "passed",
        "hang": "hung",
        "die": "failed",
        "break_the_context": "failed",
        "machine": "passed",
    }
    assert found["hang"]["reason"].startswith("ended after 30 s; it was waiting for good, beside")
    beside = int(found["hang"]["reason"].rsplit(" ", 1)[1])
    wait_until(lambda: has_ended(beside), "the process beside the one that hung is gone")
    assert "ended with status 7, with the last words: out of luck" in found["die"]["reason"]
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["break_the_context"]["reason"]


@pytest.mark.slow
@pytest.mark.by_turns
def test_what_is_wrong_is_found(python: str, tmp_path: Path) -> None:
    steps = (DRIVER, double("corrupting"), double("early"), double("late"))
    status, found = run(python, tmp_path, steps=steps)
    assert status == 1
    assert "wrong bytes with seed 0" in found["corrupting"]["reason"]
    assert "words were older than their arrival" in found["early"]["reason"]
    assert "after fence: " in found["late"]["reason"]


@pytest.mark.slow
def test_steps_for_which_there_is_no_time_are_left_out(python: str, tmp_path: Path) -> None:
    status, found = run(python, tmp_path, "--minutes", "0.001", "--only", "kinds")
    assert status == 1
    assert "left-out" in states(found).values()


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu-check", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu-check: there is no GPU that can be used: OSError: libcuda")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["steps"]["driver"]["state"] == "no-gpu"


def test_a_driver_that_hangs_or_fails_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    assert needs.gpu_problem(str(script)) == "there is no GPU that can be used: status 3"
    script.write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setattr(needs, "LOOK_TIMEOUT_S", 0.2)
    assert needs.gpu_problem(str(script)).startswith("CUDA's driver did not start within")


@pytest.mark.slow
def test_what_is_missing_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Cython", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise ImportError\n")
    (tmp_path / "setuptools.py").write_text("__version__ = '44.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    packages, compiler, *rest = needs.missing(sys.executable, is_built=False)
    assert "has no msgspec>=0.19, setuptools>=61, Cython>=3.1. With a network" in packages
    assert "--find-links wheels" in packages
    assert "'Cython>=3.1'" in packages
    assert compiler.startswith("a C compiler: ")
    assert not rest
    assert "has no msgspec>=0.19. " in needs.missing(sys.executable, is_built=True)[0]


@pytest.mark.slow
@pytest.mark.by_turns
def test_te_is_built_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """A small one: setup.py says what is compiled."""
    root, folder = tmp_path / "root", tmp_path / "built"
    (root / "te").mkdir(parents=True)
    (root / "te" / "one.pyx").write_text("def answer(): return 42\n")
    (root / "te" / "one.c").write_text("#error this is made of another .pyx\n")
    (root / "te" / "__init__.py").touch()
    (root / "setup.py").write_text(
        "from setuptools import Extension, setup\n"
        "setup(ext_modules=[Extension('te.one', ['te/one.pyx'])])\n"
    )
    built = build(root, folder, sys.executable)
    code = "import te.one; print(te.one.answer())"
    environment = os.environ | {"PYTHONPATH": str(built)}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True)
    assert done.stdout == b"42\n", done.stderr
    assert build(root, folder, sys.executable) == built
    assert not list(root.rglob("*.so"))
    (root / "te" / "one.pyx").write_text("def answer(: return 42\n")
    with pytest.raises(BuildError, match=r"failed \(all of it: .*build.log\)"):
        build(root, folder, sys.executable)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--peers", "nccl"], "no peer 'nccl'; there are mooncake, nixl"),
        (["--only", "nothing"], "no step is like 'nothing'"),
        (["--minutes", "0"], "--minutes must be above 0"),
    ],
)
def test_bad_arguments_are_answered_in_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert says in capsys.readouterr().err


def test_the_exit_status_is_of_what_was_checked() -> None:
    checks, figures = chosen(STEPS, "kinds,copies")
    bars = [{"bar": "a", "value": 0.7, "is_reached": False}]
    passed = Result(checks, "passed")
    assert exit_status([passed, Result(figures, "failed"), Result(checks, "skipped")]) == 0
    assert exit_status([passed, Result(checks, "hung")]) == 1
    assert exit_status([Result(DRIVER, "no-gpu")]) == 2
    assert verdicts([Result(figures, "passed", bars=bars)]) == ["copies: a: 0.70, MISSED"]


def test_the_steps_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(STEPS)
