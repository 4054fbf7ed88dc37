# SPDX-License-Identifier: Apache-2.0
"""Runs a case: every variant in a pair of its own, alternated round by round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from te_bench import machine
from te_bench.contenders import ALONE, OURS, VARIANTS, family
from te_bench.contenders.floor import all_floors, fitting
from te_bench.pairs import ContenderAbsent, ContenderFailed, Pair, Solo
from te_bench.protocol import Setup
from te_bench.report import CaseResult, VariantRun
from te_bench.shapes import Shape

__all__ = ["Case", "run_case"]

Progress = Callable[[float, str], None]
"""Called with the part that is done, 0 to 1, and what is being done."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape in one setting, with those who take part."""

    shape: Shape
    transport: str
    memory: str
    busy: bool
    rounds: int
    seed: int
    #: Beside te: families by name, or contenders as ``module:Class``.
    peers: Sequence[str]
    #: ``"fit"``, ``"all"``, or names of floors; used when ``peers`` has ``"floor"``.
    floors: str
    #: Interpreters: of te and the floors, and of everybody else.
    python: str
    peers_python: str
    deadline_s: float


def run_case(case: Case, progress: Progress) -> CaseResult:
    """Measures; a variant that is absent or fails is left out of later rounds, and says why."""
    about = machine.describe()
    with contextlib.ExitStack() as stack:
        runs: list[VariantRun] = []
        pairs: dict[str, Pair] = {}
        rails = 1
        waiting = ["te", *(name for peer in case.peers for name in VARIANTS.get(peer, (peer,)))]
        while waiting:
            name = waiting.pop(0)
            if name == "floor":
                waiting[:0] = _floors(case, rails)
                continue
            progress(0.0, f"starting {name}")
            run = VariantRun(name, _family(case, name, rails))
            runs.append(run)
            pair = _start(case, run)
            if pair is not None:
                pairs[name] = stack.enter_context(pair)
                # te comes first: the floor gets as many connections.
                rails = pair.rails if name == "te" else rails
        _alternate(case, runs, pairs, progress)
    about["load_1min_after"] = machine.describe()["load_1min"]
    return _result(case, runs, about)


def _alternate(
    case: Case, runs: Sequence[VariantRun], pairs: dict[str, Pair], progress: Progress
) -> None:
    """A round that counts for nothing, then the rounds; each begins with another variant."""
    started_s = time.monotonic()
    steps = (case.rounds + 1) * len(runs)
    for number in range(case.rounds + 1):
        for place in range(len(runs)):
            run = runs[(place + number) % len(runs)]
            if run.name not in pairs:
                continue
            spent_s = time.monotonic() - started_s
            at = f"round {number}/{case.rounds}" if number else "warming up"
            progress((number * len(runs) + place) / steps, f"{at}, {run.name}, {spent_s:.0f} s")
            # Seeds of all rounds differ, so that what a round left behind is wrong in the next.
            seed = case.seed * 1_000_003 + number + 1
            if not _round(case, run, pairs[run.name], seed, counts=number > 0):
                pairs.pop(run.name).close()


def _round(case: Case, run: VariantRun, pair: Pair, seed: int, *, counts: bool) -> bool:
    try:
        sample = pair.round(seed, busy=case.busy)
    except (ContenderAbsent, ContenderFailed) as error:
        run.state, run.reason = "failed", str(error)
        return False
    if counts or sample.wrong_blocks or sample.stray_slots:
        run.samples.append(sample)
    return True


def _family(case: Case, name: str, rails: int) -> str:
    """With all floors on show, only those that do te's work stand for the floor."""
    if case.floors != "all" or not name.startswith("floor:"):
        return family(name)
    fit = fitting(case.transport, case.memory, rails=rails, sync=case.shape.sync)
    return "floor" if name.removeprefix("floor:") in fit else ""


def _start(case: Case, run: VariantRun) -> Pair | None:
    ours = run.name in OURS or run.name.startswith("floor:")
    python = case.python if ours else case.peers_python

    def setup(role: Literal["source", "destination"]) -> Setup:
        return Setup(
            contender=run.name,
            role=role,
            blocks=case.shape.blocks,
            nbytes=case.shape.nbytes,
            threads=case.shape.threads,
            sync=case.shape.sync,
            transport=case.transport,
            memory=case.memory,
            seed=case.seed,
            busy=case.busy,
            deadline_s=case.deadline_s,
        )

    try:
        if run.name in ALONE:
            pair: Pair = Solo(python, setup("source"))
        else:
            pair = Pair(python, setup("source"), setup("destination"))
    except ContenderAbsent as error:
        run.state, run.reason = "absent", str(error)
        return None
    except ContenderFailed as error:
        run.state, run.reason = "failed", str(error)
        return None
    run.version = pair.version
    return pair


def _floors(case: Case, rails: int) -> list[str]:
    if case.floors == "fit":
        names = fitting(case.transport, case.memory, rails=rails, sync=case.shape.sync)
    elif case.floors == "all":
        names = all_floors(rails=rails, sync=case.shape.sync)
    else:
        names = case.floors.split(",")
    return [f"floor:{name}" for name in names]


def _result(case: Case, runs: Sequence[VariantRun], about: dict[str, Any]) -> CaseResult:
    return CaseResult(
        shape=case.shape.name,
        blocks=case.shape.blocks,
        nbytes=case.shape.nbytes,
        threads=case.shape.threads,
        sync=case.shape.sync,
        transport=case.transport,
        memory=case.memory,
        busy=case.busy,
        rounds=case.rounds,
        seed=case.seed,
        runs=runs,
        machine=about,
    )
