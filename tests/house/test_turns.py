# SPDX-License-Identifier: Apache-2.0
"""Tests by turns: each run has a part, all parts together have all, and groups stay whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testrun.table import read_times
from testrun.turns import PARTS, Turn, pick_of_commit

SCRIPTS = Path(__file__).parents[2] / "scripts"

pytest_plugins = ["pytester"]


@given(st.sets(st.text(max_size=5), max_size=40))
def test_each_group_has_its_turn_once(groups: set[str]) -> None:
    parts = [Turn(number).choose(groups) for number in range(1, PARTS + 1)]
    assert set().union(*parts) == groups
    assert sum(len(part) for part in parts) == len(groups)
    assert max(len(part) for part in parts) - min(len(part) for part in parts) <= 1


@given(st.integers(0, 2**160 - 1))
def test_a_commit_has_a_turn(commit: int) -> None:
    turn = Turn.of_commit(f"{commit:040x}")
    assert Turn.parse(str(turn)) == turn


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0"])
def test_a_turn_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"turn {text}"):
        Turn.parse(text)


TESTS = """
import pytest

@pytest.mark.each_run
def test_always():
    pass

def test_unmarked():
    pass

@pytest.mark.fast
def test_quick():
    pass

@pytest.mark.driver("rxe")
def test_of_one_device():
    pass

@pytest.mark.parametrize("number", [
    pytest.param(number, marks=pytest.mark.by_turns(f"pair {number}")) for number in range(3)
])
class TestShared:
    def test_one(self, number):
        pass

    def test_other(self, number):
        pass
"""
FILE = """
import pytest

pytestmark = pytest.mark.by_turns

def test_first():
    pass

def test_last():
    pass
"""


SETS = """
import pytest

@pytest.mark.parametrize("member", [
    pytest.param(name, marks=pytest.mark.one_of("letters", name)) for name in "cab"
])
def test_letter(member):
    pass
"""


ALONE = """
import pytest

@pytest.mark.by_turns(alone=True)
@pytest.mark.parametrize("number", range(3))
def test_alone(number):
    pass
"""


DEVICE = """
import pytest

@pytest.mark.by_turns("of one device")
@pytest.mark.driver
def test_a_device():
    pass
"""


def run(pytester: pytest.Pytester, *arguments: str, apart: bool = False) -> list[str]:
    """The tests that were run, without their files. ``apart``: by a process of its own."""
    times = pytester.path / "times"
    times.unlink(missing_ok=True)
    for name, text in (("these", TESTS), ("file", FILE), ("sets", SETS)):
        (pytester.path / f"test_{name}.py").write_text(text)
    config = pytester.path / "pytest.ini"
    config.write_text("[pytest]\nmarkers =\n  by_turns\n  driver\n  each_run\n  fast\n  one_of\n")
    call = pytester.runpytest_subprocess if apart else pytester.runpytest_inprocess
    done = call("-q", "-c", config, "-p", "testrun.plugin", "--times", times, *arguments)
    assert done.ret == 0
    return sorted(name.rpartition("::")[2] for name in read_times(times.read_text().splitlines()))


@pytest.mark.slow
def test_parts_are_all_and_groups_stay_whole(pytester: pytest.Pytester) -> None:
    shared = [f"test_{name}[{number}]" for name in ("one", "other") for number in range(3)]
    parts = [run(pytester, "--turn", f"{number}/3") for number in (1, 2, 3)]
    letters = [f"test_letter[{name}]" for name in "abc"]
    always = ["test_always", "test_of_one_device", "test_quick", "test_unmarked", *letters]
    assert run(pytester) == sorted([*always, "test_first", "test_last", *shared])
    turns = [sorted(set(part) - set(always)) for part in parts]
    assert sorted(turns) == sorted(
        [
            ["test_first", "test_last", "test_one[2]", "test_other[2]"],
            ["test_one[0]", "test_other[0]"],
            ["test_one[1]", "test_other[1]"],
        ]
    )
    assert all(set(always) < set(part) for part in parts)


@pytest.mark.slow
def test_those_alone_take_turns_one_by_one(pytester: pytest.Pytester) -> None:
    (pytester.path / "test_alone.py").write_text(ALONE)
    parts = [run(pytester, "--turn", f"{number}/3") for number in (1, 2, 3)]
    found = [[name for name in part if name.startswith("test_alone")] for part in parts]
    assert sorted(found) == [[f"test_alone[{number}]"] for number in range(3)]


@pytest.mark.slow
def test_those_without_a_mark_take_turns_if_asked_to(pytester: pytest.Pytester) -> None:
    parts = [run(pytester, "--unmarked-too", "--turn", f"{number}/3") for number in (1, 2, 3)]
    assert all({"test_always", "test_of_one_device"} <= set(part) for part in parts)
    assert sum("test_unmarked" in part for part in parts) == 1
    assert sum("test_quick" in part for part in parts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_two_runs_share_those_without_a_mark(pytester: pytest.Pytester, number: int) -> None:
    turn = ("--turn", f"{number}/3")
    these = set(run(pytester, "--unmarked-too", *turn))
    # What one of them alone has changes nothing.
    (pytester.path / "test_a_device.py").write_text(DEVICE)
    others = set(run(pytester, "--unmarked-others", *turn))
    unmarked = {"test_unmarked", "test_quick", *(f"test_letter[{name}]" for name in "abc")}
    assert not these & others & unmarked
    assert these | others > unmarked
    assert {"test_always", "test_of_one_device"} <= these & others


@pytest.mark.slow
def test_those_of_the_fast_layer_take_turns_if_asked_to(pytester: pytest.Pytester) -> None:
    parts = [run(pytester, "--fast-too", "--turn", f"{number}/3") for number in (1, 2, 3)]
    assert all({"test_always", "test_unmarked"} <= set(part) for part in parts)
    assert sum("test_quick" in part for part in parts) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("pick", "letter"), [(0, "a"), (1, "b"), (5, "c"), (6, "a")])
def test_of_a_set_one_member_is_picked(pytester: pytest.Pytester, pick: int, letter: str) -> None:
    ran = run(pytester, "--pick", str(pick))
    assert [name for name in ran if name.startswith("test_letter")] == [f"test_letter[{letter}]"]
    assert "test_unmarked" in ran


@given(st.integers(0, 2**160 - 1))
def test_a_commit_picks(commit: int) -> None:
    assert 0 <= pick_of_commit(f"{commit:040x}") < 1000


@pytest.mark.slow
def test_workers_leave_out_the_same(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SCRIPTS))
    workers = run(pytester, "--turn", "2/3", "-n", "2", apart=True)
    assert workers == run(pytester, "--turn", "2/3")


def test_times_of_a_test_are_added_up() -> None:
    lines = [json.dumps(line) for line in (["a", 1.0, 0.5], ["b", 2.0, 1.0], ["a", 3.0, 0.25])]
    assert read_times(lines) == {"a": (4.0, 0.75), "b": (2.0, 1.0)}
