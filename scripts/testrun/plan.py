# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/test`` runs: pure, from its options to lanes of commands.

Two cores carry two lanes that compute. Real servers are one. The other has what computes besides;
emulated machines, which have one processor each and wait much, are a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testrun.lanes import Lane, Step

__all__ = ["Options", "before_lanes", "fast_step", "lanes", "static_steps"]

#: pytest says this when its arguments chose no test.
NO_TESTS = 5
DURATIONS = "--durations=15"
# Who is done early takes over from the other: a few tests are as long as hundreds of others.
BOTH_CORES = ("-n", "2", "--dist", "worksteal")
# With nothing beside them: half of what the fast tests take is waiting.
WAITING = ("-n", "4", "--dist", "worksteal")
DRIVERS = ("rxe", "siw")
DEMO_REQUESTS = 8
TESTBED_TIMEOUT_S = 1500


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    #: The directory of programs of the virtual environment.
    bin: Path
    #: A directory for what one step leaves for another.
    scratch: Path
    fast: bool = False
    #: Every layout of real servers, not a choice that covers each pair.
    all_layouts: bool = False
    #: For every pytest; with some, only what is pytest is run.
    pytest_args: Sequence[str] = ()


def static_steps(options: Options) -> list[Step]:
    """What needs seconds, before anything else."""
    commands = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    commands = (*commands, ("lint-imports",))
    return [Step(" ".join(argv), [str(options.bin / argv[0]), *argv[1:]]) for argv in commands]


def before_lanes() -> list[Step]:
    """What two lanes would wait for each other to do."""
    return [Step("the emulated machines' kernel", ["scripts/rdma-testbed", "--build"])]


def fast_step(options: Options) -> Step:
    """What needs neither SGLang nor vLLM nor RDMA nor minutes."""
    heavy = ("serving", "sglang", "vllm", "rdma", "testbed", "sanitize", "slow")
    marks = " and ".join(f"not {one}" for one in heavy)
    # They import torch as they are collected, tests/lmcache LMCache as well.
    where = ("--ignore", "tests/sglang", "--ignore", "tests/lmcache", "tests")
    return _pytest(options, "fast tests", *WAITING, "-m", marks, *where)


def lanes(options: Options) -> list[Lane]:
    """Everything, side by side."""
    layouts = "serving" if options.all_layouts else "serving and not matrix"
    servers = [
        _pytest(options, "real servers", "-m", layouts, "tests/serving"),
        _pytest(options, "real servers of vLLM", "-m", "vllm", "tests/vllm"),
    ]
    marks = "not serving and not vllm and not rdma and not sanitize"
    here = [
        _pytest(options, "tests on this machine", *BOTH_CORES, "-m", marks, "tests"),
        _pytest(options, "sanitizers", "-m", "sanitize", "tests/sanitize"),
    ]
    if not options.pytest_args:
        here.append(Step("documentation site", ["scripts/docs"]))
        servers += _demos(options.scratch / "reference.json")
    machines = [
        _on_devices(options, nics, driver, *where)
        for driver in DRIVERS
        for nics, where in ((8, ["tests/rdma"]), (2, ["tests/te", "tests/sglang_mooncake"]))
    ]
    return [Lane("servers", servers), Lane("here", here), Lane("machines", machines)]


def _pytest(options: Options, name: str, *arguments: str) -> Step:
    argv = [str(options.bin / "python"), "-m", "pytest", DURATIONS, *arguments]
    good = {0, NO_TESTS} if options.pytest_args else {0}
    return Step(name, [*argv, *options.pytest_args], good=frozenset(good))


def _on_devices(options: Options, nics: int, driver: str, *where: str) -> Step:
    name = f"{' '.join(where)} on {nics} {driver} devices"
    inside = _pytest(options, name, "-m", "rdma", *where)
    machine = ["--nics", str(nics), "--driver", driver]
    return Step(name, _testbed(*machine, argv=inside.argv), good=inside.good)


def _demos(reference: Path) -> list[Step]:
    """The main job from an installed wheel, and over RDMA. What one ordinary server answers is
    found once, and outside the emulated machine, where a server starts ten times as fast."""
    requests = ["--requests", str(DEMO_REQUESTS)]
    demo, known = ["scripts/demo", *requests], ["--reference", str(reference)]
    inside = [*demo, "--transport", "rdma", *known]
    return [
        Step("reference tokens", [*demo, "--write-reference", str(reference)]),
        Step("demo from the wheel", ["scripts/wheel-demo", *requests, *known]),
        Step("demo over RDMA", _testbed("--nics", "2", "--memory", "12", argv=inside)),
    ]


def _testbed(*machine: str, argv: Sequence[str]) -> list[str]:
    timeout = ["--timeout", str(TESTBED_TIMEOUT_S)]
    return ["scripts/rdma-testbed", *machine, *timeout, "--", *argv]
