# SPDX-License-Identifier: Apache-2.0
"""The walks of a request in docs/architecture.md: each stop is a function that is there, and leads
to the next one by what the walk says."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sglang_mooncake"
TEXT = (ROOT / "docs/architecture.md").read_text()
ROW = re.compile(r"\| (\d+) \| (\w) \| `([\w/.]+)` `([\w.]+)` \| [^|]* \| ?([^|]*?) ?\|")
#: Who leads on where no code of ours does.
OTHERS = {"SGLang", "the prefill rank", "the decode rank", "its caller", "its thread", ""}
STOPS_MAX = 20
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Stop(NamedTuple):
    thread: str
    path: str
    function: str
    by: str


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text())


def function(path: str, name: str) -> Function | None:
    """A function of a module, or a method, by `Class.name`."""
    scope: ast.AST = tree(path)
    for part in name.split("."):
        found = [one for one in ast.iter_child_nodes(scope) if getattr(one, "name", None) == part]
        if not found:
            return None
        (scope,) = found
    return scope if isinstance(scope, Function) else None


def names(node: ast.AST) -> set[str]:
    """What a piece of code names."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def helpers(path: str, called: set[str]) -> Iterator[Function]:
    """Functions of a module with these names."""
    for node in ast.walk(tree(path)):
        if isinstance(node, Function) and node.name in called:
            yield node


def reached(path: str, called: set[str], steps: int = 2) -> set[str]:
    """Names that code of a module comes to through so many of the module's own functions."""
    found = set(called)
    for _ in range(steps):
        found |= {name for one in helpers(path, found) for name in names(one)}
    return found


def callbacks(side: str, class_name: str) -> set[str]:
    """What a side gives to the making of a class."""
    calls = [one for one in ast.walk(tree(side)) if isinstance(one, ast.Call)]
    made = [one for one in calls if getattr(one.func, "id", None) == class_name]
    return {name for one in made for name in names(one)}


def dispatched(path: str, by: str) -> set[str]:
    """What a module does in the cases of an event, instruction or message."""
    cases = [one for one in ast.walk(tree(path)) if isinstance(one, ast.match_case)]
    mine = [one for one in cases if by in names(one.pattern)]
    return {name for one in mine for statement in one.body for name in names(statement)}


def stops(side: str) -> list[Stop]:
    begin = TEXT.index(f"#### A hand-over on the {side} side")
    section = TEXT[begin : TEXT.index("\n#", begin + 1)]
    rows = ROW.findall(section)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    return [Stop(thread, path, name, by.strip("`")) for _, thread, path, name, by in rows]


def problem(side: str, stop: Stop, following: Stop) -> str | None:
    """Why a stop does not lead to the next one."""
    if stop.by in OTHERS:
        return None
    here = function(stop.path, stop.function)
    assert here is not None
    shell = f"{side}_side.py"
    said = reached(stop.path, names(here), 1)
    if stop.by not in said | callbacks(shell, stop.function.partition(".")[0]):
        return f"{stop.path} {stop.function} says nothing of {stop.by}"
    name, there = (
        following.function.rpartition(".")[2],
        function(following.path, following.function),
    )
    assert there is not None
    if name == stop.by or stop.by in names(there):
        return None
    handled = dispatched(following.path, stop.by) | dispatched(shell, stop.by)
    if name in reached(following.path, reached(shell, handled, 1)):
        return None
    return f"{stop.by} does not lead to {following.path} {following.function}"


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_every_stop_of_a_hand_over_is_there_and_leads_to_the_next(side: str) -> None:
    walk = stops(side)
    assert 10 < len(walk) <= STOPS_MAX
    missing = [one for one in walk if function(one.path, one.function) is None]
    assert not missing, "stops that are not in the code"
    wrong = [problem(side, *pair) for pair in itertools.pairwise(walk)]
    assert not [one for one in wrong if one]


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_a_stop_that_leads_elsewhere_is_seen(side: str) -> None:
    elsewhere = Stop("L", "stats.py", "Recorder._keep_file", "")
    for stop, following in itertools.pairwise(stops(side)):
        if stop.by not in OTHERS:
            assert problem(side, stop, elsewhere), f"{stop} leads everywhere"
            assert problem(side, stop._replace(by="Nothing"), following)
