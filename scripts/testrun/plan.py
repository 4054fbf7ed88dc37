# SPDX-License-Identifier: Apache-2.0
"""What ``scripts/test`` runs: pure, from its options to lanes of commands.

Two cores carry two lanes that compute. Real servers are one. The other has what computes besides;
emulated machines, which have one processor each and wait much, and the demos are a third. Each lane
begins with what it has to set up, so that none waits for what only another one needs. Lanes do not
take the same time on each machine and in each turn: what needs no lane of its own is for whichever
is done first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testrun.lanes import Lane, Step
from testrun.turns import Turn

__all__ = ["Options", "fast_lanes", "lanes", "shared"]

#: pytest says this when its arguments chose no test.
NO_TESTS = 5
# Who is done early takes over from the other: a few tests are as long as hundreds of others.
BOTH_CORES = ("-n", "2", "--dist", "worksteal")
#: The fast layer: tests/conftest.py says what belongs to it.
FAST = ("-m", "fast")
#: Half of what the fast tests take is waiting, so more of them run at once than there are cores: in
#: parts that take much the same time. Workers of xdist would each read all the tests, five seconds
#: of a processor; the process of a part reads its own.
TE_FIRST = "test_te_[a-c]*"
KVSTORE_FIRST = "test_kvstore_[a-n]*"
ELSEWHERE = ("te", "kvstore", "sglang_mooncake", "vllm", "router", "bootstrap_server")
FAST_PARTS = {
    "te, a to c": ("-o", f"python_files={TE_FIRST}.py", "tests/te"),
    "te, the rest": (f"--ignore-glob=*/{TE_FIRST}", "tests/te"),
    "kvstore, a to n": ("-o", f"python_files={KVSTORE_FIRST}.py", "tests/kvstore"),
    "kvstore, the rest": (f"--ignore-glob=*/{KVSTORE_FIRST}", "tests/kvstore"),
    "sglang_mooncake": ("tests/sglang_mooncake", "tests/vllm"),
    "router": ("tests/router",),
    "registry": ("tests/bootstrap_server",),
    "all else": (
        *(f"--ignore=tests/{one}" for one in ELSEWHERE),
        "tests",
    ),
}
#: Of the fast tests those with hypothesis, with more examples than in the fast layer. They take
#: turns: the examples follow from the test alone, and fast tests whose first fifty leave a branch
#: out have all of them in the fast layer.
REST = ("--fast-too", "-m", "(not fast or hypothesis) and not serving and not vllm and not rdma")
#: These import SGLang or LMCache, and torch: one process does so, where each worker of xdist would.
INSIDE = ("tests/lmcache", "tests/sglang")
DEMO_REQUESTS = 8
#: Which part of the tests that take turns has the demo over RDMA; others have it from the wheel.
OVER_RDMA = 3
TESTBED_TIMEOUT_S = 1500


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    #: The checkout.
    root: Path
    #: A directory below it for what one step leaves for another.
    scratch: Path
    fast: bool = False
    #: Which part of the tests that take turns; without one all of them.
    turn: Turn | None = None
    #: Which one of each set of tests of which a run has one; without one all of them.
    pick: int | None = None
    #: For every pytest; with some, only what is pytest is run.
    pytest_args: Sequence[str] = ()

    @property
    def bin(self) -> Path:
        """The programs of the virtual environment."""
        return self.root / ".venv/bin"

    def times(self, step: str) -> Path:
        """Where pytest writes how long the tests of a step took."""
        return self.scratch / f"{step.replace('/', '-').replace(' ', '-')}.times"


def fast_lanes(options: Options) -> list[Lane]:
    """What needs neither SGLang nor vLLM nor RDMA nor minutes."""
    parts = [
        Lane(
            f"tests of {name}",
            [_setup("fast"), _pytest(options, f"fast tests: {name}", *FAST, *part)],
        )
        for name, part in FAST_PARTS.items()
    ]
    return [Lane("checks", [_setup("fast"), *_static(options)]), *parts]


def lanes(options: Options) -> list[Lane]:
    """Everything, side by side."""
    servers = [
        _setup("serving"),
        _pytest(options, "real servers", "-m", "serving", "tests/serving"),
        _setup("vllm"),
        _pytest(options, "real servers of vLLM", "-m", "vllm", "tests/vllm"),
    ]
    here = [
        _setup("serving"),
        Step("fast layer in a fresh clone", ["scripts/test-alone", "--compiled"]),
        _setup("peer", "nixl"),
        _pytest(
            options,
            "tests on this machine",
            *(*BOTH_CORES, *REST, *(f"--ignore={one}" for one in INSIDE), "tests"),
        ),
    ]
    machines = [
        Step("the emulated machines' kernel", ["scripts/rdma-testbed", "--build"], is_needed=True),
        _setup("serving"),
        _on_devices(options, 8, "rxe", "--unmarked-others", "tests/rdma"),
        _on_devices(options, 2, "rxe", "--unmarked-others", "tests/te", "tests/sglang_mooncake"),
        _on_devices(options, 8, "siw", "--unmarked-too", "tests/rdma"),
        _on_devices(options, 2, "siw", "--unmarked-too", "tests/te", "tests/sglang_mooncake"),
    ]
    if options.pytest_args:
        here[1] = _pytest(options, "fast tests", *BOTH_CORES, *FAST, "tests")
    else:
        machines += _demos(options)
    return [Lane("servers", servers), Lane("here", here), Lane("machines", machines)]


def shared(options: Options) -> list[Step]:
    """What any lane may do when it is done with its own, the longest first. It needs what each lane
    has set up."""
    return [
        _sanitizer(options, "address"),
        _sanitizer(options, "thread"),
        _pytest(options, "tests inside SGLang and LMCache", *REST, *INSIDE),
    ]


def _setup(*stage: str) -> Step:
    """Several lanes ask for it: one of them does it, and the others wait for that."""
    return Step(f"set-up: {' '.join(stage)}", ["scripts/setup", *stage], is_needed=True)


def _static(options: Options) -> list[Step]:
    commands = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    commands = (*commands, ("lint-imports",))
    return [Step(" ".join(argv), [str(options.bin / argv[0]), *argv[1:]]) for argv in commands]


def _pytest(options: Options, name: str, *arguments: str) -> Step:
    argv = [str(options.bin / "python"), "-m", "pytest", *_watched(options, name), *arguments]
    return Step(name, [*argv, *options.pytest_args], good=_good(options))


def _good(options: Options) -> frozenset[int]:
    """Exit statuses of pytest that are no failure."""
    return frozenset({0, NO_TESTS} if options.pytest_args else {0})


def _watched(options: Options, name: str) -> list[str]:
    """What ``testrun.plugin`` is told."""
    told = ["-p", "testrun.plugin", "--times", str(options.times(name))]
    if options.pick is not None:
        told += ["--pick", str(options.pick)]
    return told if options.turn is None else [*told, "--turn", str(options.turn)]


def _sanitizer(options: Options, kind: str) -> Step:
    name = f"{kind} sanitizer"
    told = [*_watched(options, name), "--unmarked-too", *options.pytest_args]
    return Step(name, ["scripts/sanitize", kind, "--", *told], good=_good(options))


def _on_devices(options: Options, nics: int, driver: str, *where: str) -> Step:
    folders = " ".join(one for one in where if not one.startswith("-"))
    inside = _pytest(options, f"{folders} on {nics} {driver} devices", "-m", "rdma", *where)
    machine = ["--nics", str(nics), "--driver", driver]
    return Step(inside.name, _testbed(*machine, argv=inside.argv), good=inside.good)


def _demos(options: Options) -> list[Step]:
    """The main job from an installed wheel in two runs of three, with a wheel for another Python in
    one of these; over RDMA in the third."""
    turn = None if options.turn is None else options.turn.number
    demo = ["--requests", str(DEMO_REQUESTS)]
    steps = []
    if turn != OVER_RDMA:
        another = ["--one-more"] if turn in (None, 1) else []
        steps.append(Step("demo from the wheel", ["scripts/wheel-demo", *another, *demo]))
    if turn in (None, OVER_RDMA):
        # What one ordinary server answers is found outside the emulated machine, where a server
        # starts slowly.
        tokens = str(options.scratch / "reference.json")
        inside = ["scripts/demo", *demo, "--transport", "rdma", "--reference", tokens]
        steps += [
            Step("reference tokens", ["scripts/demo", *demo, "--write-reference", tokens]),
            Step("demo over RDMA", _testbed("--nics", "2", "--memory", "12", argv=inside)),
        ]
    return steps


def _testbed(*machine: str, argv: Sequence[str]) -> list[str]:
    timeout = ["--timeout", str(TESTBED_TIMEOUT_S)]
    return ["scripts/rdma-testbed", *machine, *timeout, "--", *argv]
