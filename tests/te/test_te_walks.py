# SPDX-License-Identifier: Apache-2.0
"""The walks of two writes and a fence in docs/architecture.md: each stop is a function that is
there, and leads to the next one by what the walk says; a reader opens few files, and goes one
way."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
TE = ROOT / "te"
TEXT = (ROOT / "docs/architecture.md").read_text()
ROW = re.compile(r"\| (\d+) \| \w \| `([\w/.]+)` `(\w+)` \| ([^|]*) \| ?([^|]*?) ?\|")
MENTIONED = re.compile(r"`([\w/]+\.(?:py|pyx|h))`")
FUNCTION = re.compile(r"^(?=c?def |[ ]+def )", re.MULTILINE)
NAME = re.compile(r"[ ]*c?def [^\n(]*?\b(\w+)\(")
STOPS_MAX = 10
FILES_MAX = 10
#: Who goes on where no call leads there.
OTHERS = ("the caller", "the destination", "the source", "the worker", "")
WALKS = ["A write over TCP", "A write over RDMA", "A fence"]
#: As many functions of one file may a stop stand for.
STEPS = 3


class Stop(NamedTuple):
    path: str
    function: str
    what: str
    by: str

    @property
    def is_told(self) -> bool:
        """Whether code leads to the next one, and not somebody else."""
        return self.by.startswith("`")


@cache
def functions(path: str) -> dict[str, set[str]]:
    """The functions of a module, and what each of them names."""
    source = re.sub(r"#.*", "", (TE / path).read_text())
    parts = ((NAME.match(part), part) for part in FUNCTION.split(source))
    return {found[1]: set(re.findall(r"\w+", part)) for found, part in parts if found}


@cache
def operations() -> frozenset[tuple[str, str]]:
    """Which functions are given as which operations."""
    given = re.compile(r"^[ ]*\w+\.(\w+) = (\w+)$", re.MULTILINE)
    return frozenset(pair for path in TE.rglob("*.pyx") for pair in given.findall(path.read_text()))


def reached(stop: Stop) -> set[str]:
    """What code of the stop's file names, from its function on."""
    here = functions(stop.path)
    found = {stop.function}
    for _ in range(STEPS):
        found |= {name for one in found for name in here.get(one, ())}
    return found


def problem(stop: Stop, following: Stop) -> str | None:
    """Why a stop does not lead to the next one."""
    if not stop.is_told:
        if stop.by.partition(", by")[0] in OTHERS:
            return None
        return f"nobody knows who is {stop.by}"
    by = stop.by.strip("`")
    if by not in reached(stop):
        return f"{stop.path} {stop.function} says nothing of {by}"
    if by == following.function or (by, following.function) in operations():
        return None
    # A function of the next file that has the next stop's run later: a command.
    if by in functions(following.path) and following.function in functions(following.path)[by]:
        return None
    return f"{by} does not lead to {following.path} {following.function}"


def files(stop: Stop) -> set[Path]:
    """What a reader opens for a stop: its file, and those that it stands on."""
    found = set()
    for name in (stop.path, *MENTIONED.findall(f"{stop.what} {stop.by}")):
        (path,) = [one for one in TE.rglob(Path(name).name) if one.as_posix().endswith(f"/{name}")]
        found.add(path)
    return found


def legs(walk: list[Stop]) -> list[list[str]]:
    """The files of stops that calls lead between, one after the other."""
    found: list[list[str]] = [[]]
    for stop in walk:
        if found[-1][-1:] != [stop.path]:
            found[-1].append(stop.path)
        if not stop.is_told:
            found.append([])
    return found


def stops(walk: str) -> list[Stop]:
    begin = TEXT.index(f"#### {walk}\n")
    rows = ROW.findall(TEXT[begin : TEXT.index("\n#", begin + 1)])
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    return [Stop(*row) for _, *row in rows]


@pytest.mark.parametrize("walk", WALKS)
def test_every_stop_is_there_and_leads_to_the_next(walk: str) -> None:
    found = stops(walk)
    assert 5 < len(found) <= STOPS_MAX
    missing = [one for one in found if one.function not in functions(one.path)]
    assert not missing, "stops that are not in the code"
    wrong = [problem(*pair) for pair in itertools.pairwise(found)]
    assert not [one for one in wrong if one]


@pytest.mark.parametrize("walk", WALKS)
def test_a_reader_opens_few_files_and_goes_one_way(walk: str) -> None:
    found = stops(walk)
    opened = set().union(*map(files, found))
    assert len(opened) <= FILES_MAX, sorted(map(str, opened))
    for leg in legs(found):
        assert len(set(leg)) == len(leg), f"back where it came from: {leg}"


def test_a_walk_that_comes_back_is_seen() -> None:
    there, here = Stop("a.pyx", "a", "", "`b`"), Stop("b.pyx", "b", "", "`a`")
    assert legs([there, there, here]) == [["a.pyx", "b.pyx"]]
    assert legs([there, here, there]) == [["a.pyx", "b.pyx", "a.pyx"]]


@pytest.mark.parametrize("walk", WALKS)
def test_a_stop_that_leads_elsewhere_is_seen(walk: str) -> None:
    elsewhere = Stop("core/heap.pxd", "need", "", "")
    found = [one for one in stops(walk) if one.is_told]
    assert found
    for stop in found:
        assert problem(stop, elsewhere), f"{stop} leads everywhere"
        assert problem(stop._replace(by="`nothing_at_all`"), elsewhere)
