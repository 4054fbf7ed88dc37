# SPDX-License-Identifier: Apache-2.0
"""scripts/nixl-beside: what is asked for, its tables, and its rows of two agents over te."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Literal

import pytest
from cpu_serving.traffic import Answer, Request
from nixl_beside import agents, command, contenders, processes
from nixl_beside.options import parse
from nixl_beside.processes import AgentError, AgentPair
from nixl_beside.rows import ROWS, Answers, Ended, Landed, Lists, Served, Spent, table
from nixl_beside.servers import Known

from te_bench.pairs import Pair
from te_bench.protocol import Setup

PATIENCE_S = 60.0


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "agents.log"


def test_what_is_asked_for() -> None:
    options = parse([])
    assert (options.rows, options.contenders) == (tuple(ROWS), ("te", "nixl"))
    options = parse(["--rows", "post,silent", "--contenders", "te", "--rounds", "2"])
    assert (options.rows, options.contenders, options.rounds) == (("silent", "post"), ("te",), 2)


def test_a_cell_says_what_became_of_it() -> None:
    assert str(Ended("ERR", 5.04)) == "`ERR` after 5.0 s"
    assert str(Ended("PROC", 30.0)).startswith("`PROC` for 30.0 s")
    assert str(Landed(0, 64, 0.1)) == "released after 0.1 s; 0 of 64 B landed afterwards"
    assert str(Landed(0, 64, None)) == "could not be released"
    assert str(Served(6.0, 30.0, is_right=True)) == "answered right after 6.0 s"
    assert str(Served(6.0, 30.0, is_right=False)) == "answered WRONG after 6.0 s"
    assert str(Served(None, 30.0, is_right=True)) == "no answer for 30 s"
    plain = Answers(3, 1, 1, 1, 2.5)
    assert str(plain) == "3 asked: 1 right, 1 wrong, 1 failed; slowest 2.5 s"
    assert "prompts handed over: 2 of 3" in str(Answers(3, 3, 0, 0, 2.5, came=2))
    assert "handed over not again" in str(Answers(3, 3, 0, 0, 2.5, has_again=True))
    assert "again after 1.5 s" in str(Answers(3, 3, 0, 0, 2.5, again_s=1.5, has_again=True))
    silent = Served(None, 30.0, is_right=False)
    said = str(Answers(3, 3, 0, 0, 2.5, meanwhile=silent))
    assert "; the other server meanwhile: no answer for 30 s; slowest" in said


def test_a_table_has_a_column_for_each_contender_and_says_where_the_bars_are() -> None:
    def taking(seconds: float) -> Lists:
        return Lists(Spent([0.001]), Spent([seconds]), Spent([seconds] * 3), 10**9)

    silent = Served(None, 30.0, is_right=False)
    lines = table(
        {
            "silent": {"te": Ended("ERR", 5.0), "nixl": Ended("PROC", 30.0)},
            "cut": {"te": "20 of 20 done"},
            "prefill-stopped": {"te": Served(7.5, 30.0, True, 2.0), "nixl": silent},
            "prefill-killed": {"te": Answers(3, 3, 0, 0, 2.5, meanwhile=silent)},
            "lists": {"te": taking(0.01), "nixl": taking(0.2)},
            "post": {"te": taking(0.05), "nixl": taking(0.2)},
            "ttft": {"te": Spent([0.9]), "nixl": Spent([1.0])},
        }
    )
    assert lines[0] == "|  | this package | NVIDIA's NIXL |"
    assert lines[3] == f"| {ROWS['cut']} | 20 of 20 done | – |"
    assert "done after 10 ms (best 10 ms): 100 GB/s" in lines[6]
    assert lines[-5:] == [
        "bar of `prefill-stopped`: 5.5 s, at most 6 s: reached",
        "bar of `prefill-killed`: no right answer, at most 6 s: NOT reached",
        "bar of `lists`: 0.050 × NIXL's, at most 0.1 ×: reached",
        "bar of `post`: 50 ms, at most 60 ms: reached",
        "bar of `ttft`: 0.900 × NIXL's, at most 0.8 ×: NOT reached",
    ]
    assert len(table({"ttft": {"te": Spent([1.0])}})) == 3, "no bar without the other one"


def test_answers_are_counted_by_what_an_ordinary_server_said() -> None:
    known = Known(
        [Request((1,)), Request((2,))], [Answer((7,), None, 0.0), Answer((8,), None, 0.0)]
    )
    got = [(0, Answer((7,), None, 1.0)), (1, Answer((7,), None, 3.0)), (1, Answer((), "502", 2.0))]
    assert known.counted(got) == Answers(3, 1, 1, 1, 3.0)


def test_without_nvidias_package_a_sentence_says_how_it_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contenders, "_NVIDIAS", tmp_path / "none")
    assert command.main(["--contenders", "nixl", "--rows", "silent"]) == command.EXIT_UNUSABLE
    said = capsys.readouterr()
    assert "run scripts/setup peer nixl" in said.err
    assert said.out == "", "there is no table of nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gone", "read-released", "write-released", "cut"])
def test_a_row_of_two_agents_finds_what_te_promises(name: str, log: Path) -> None:
    found = agents.row(name, "te", PATIENCE_S, log)
    if isinstance(found, Landed):
        assert found.nbytes == 0
        assert found.released_s is not None
    elif isinstance(found, Ended):
        assert found.state == "ERR"
    else:
        # The first one is posted before a worker without a processor has seen that all is severed.
        assert found in ("19 of 20 done", "20 of 20 done")


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(agents.SHAPES, "lists", agents.Shape(40, 256))
    path = tmp_path / "found.json"
    argv = ["--contenders", "te", "--rows", "silent,lists", "--rounds", "2", "--json", str(path)]
    assert command.main(argv) == 0
    assert "| this package |" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["silent"]["te"]["state"] == "ERR"
    assert len(found["lists"]["te"]["done"]["times_s"]) == 2


@pytest.mark.slow
def test_an_agent_that_cannot_do_what_is_asked_says_so(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with AgentPair("te", 1 << 20, log) as pair:
        with pytest.raises(AgentError, match="the near agent failed at count: TypeError"):
            pair.near.ask("count")
        monkeypatch.setattr(processes, "_DEADLINE_S", 0.01)
        pair.far.signal(signal.SIGSTOP)
        with pytest.raises(AgentError, match="the far agent has not answered to count"):
            pair.far.ask("count", 1)
        pair.far.end()
        with pytest.raises(AgentError, match="the far agent has ended at count"):
            pair.far.ask("count", 1)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_te_bench_has_the_face_as_a_contender(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))

    def side(role: Literal["source", "destination"]) -> Setup:
        return Setup(
            contender="nixl_beside.contender:Face",
            role=role,
            blocks=100,
            nbytes=256,
            threads=1,
            sync=False,
            transport=transport,
            memory="any",
            seed=1,
            busy=False,
            deadline_s=PATIENCE_S,
        )

    with Pair(sys.executable, side("source"), side("destination")) as pair:
        assert pair.version.startswith("nixl over te ")
        sample = pair.round(1, busy=False)
    assert (sample.wrong_blocks, sample.stray_slots) == (0, 0)
