# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for ``scripts/test`` (``-p testrun.plugin``).

``--times FILE`` appends how long each test took, as JSON lines: its name, seconds, processor
seconds. Set-up, call and tear-down of a test have a line each, written when they end, so that a run
that is killed leaves what it had. Processor seconds are those of the process that runs the tests,
and of children that it has waited for.

``--turn K/N`` leaves out tests that are marked ``by_turns`` and whose turn it is not; with
``--unmarked-too`` all tests take turns, one by one, but those that are marked ``each_run`` and
those that one kind of device alone has; with ``--unmarked-others`` those without a mark that this
leaves out have their turn; with ``--fast-too`` those of the fast layer take turns, which a run has
twice.

``--pick NUMBER`` leaves all but one member out of each set of tests that are marked
``one_of(SET, MEMBER)``: of the members in the order of their names the NUMBER-th, from 0, counted
round and round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from testrun.turns import Turn

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_configure"]

CPU_S = "testrun_cpu_s"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, help="file to append the time of each test to")
    parser.addoption("--turn", type=Turn.parse, help="K/N: tests by turns, the K-th of N parts")
    parser.addoption("--pick", type=int, help="which one of each set of tests, counted round")
    parser.addoption("--unmarked-too", action="store_true", help="all tests take turns")
    parser.addoption(
        "--unmarked-others", action="store_true", help="what --unmarked-too leaves out"
    )
    parser.addoption("--fast-too", action="store_true", help="those of the fast layer take turns")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--times")
    if path is not None:
        # Under xdist a worker measures, and the process that started it writes.
        is_worker = hasattr(config, "workerinput")
        config.pluginmanager.register(_Recorder(None if is_worker else path), "testrun-times")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Groups are numbered among those that the other options have left."""
    pick = config.getoption("--pick")
    if pick is not None:
        _leave(config, items, _picked(items, pick))
    turn = config.getoption("--turn")
    if turn is None:
        return
    others, fast_too = config.getoption("--unmarked-others"), config.getoption("--fast-too")
    unmarked_too = config.getoption("--unmarked-too") or others
    groups = {
        item: _group(item, unmarked_too or (fast_too and "fast" in item.keywords)) for item in items
    }
    marked = {item: item.get_closest_marker("by_turns") is not None for item in items}
    # Counted apart: a mark on what one kind of device alone has must not move all others' turns.
    chosen = {
        group
        for is_marked in (True, False)
        for group in turn.choose(g for i, g in groups.items() if g and marked[i] is is_marked)
    }

    def has_its_turn(item: pytest.Item) -> bool:
        if others and not marked[item]:
            return groups[item] not in chosen
        return groups[item] is None or groups[item] in chosen

    _leave(config, items, [item for item in items if has_its_turn(item)])


def _leave(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """No other tests than these, which are some of `items` in their order."""
    wanted = set(kept)
    left_out = [item for item in items if item not in wanted]
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _picked(items: list[pytest.Item], pick: int) -> list[pytest.Item]:
    """Those that are in no set, and of each set those of one member."""
    marks = {item: item.get_closest_marker("one_of") for item in items}
    members: dict[str, set[str]] = {}
    for mark in marks.values():
        if mark is not None:
            group, member = mark.args
            members.setdefault(group, set()).add(member)
    chosen = {group: sorted(found)[pick % len(found)] for group, found in members.items()}
    return [
        item for item, mark in marks.items() if mark is None or mark.args[1] == chosen[mark.args[0]]
    ]


def _group(item: pytest.Item, unmarked_too: bool) -> str | None:
    """Tests of one group are run together: they share what is dear to make. A mark without a name
    is for all of a file, and one that says ``alone`` for each test by itself. Without a mark a test
    is a group of its own, or in each run."""
    if item.get_closest_marker("each_run") is not None:
        return None
    mark = item.get_closest_marker("by_turns")
    if mark is None:
        has_turns = unmarked_too and item.get_closest_marker("driver") is None
        return item.nodeid if has_turns else None
    if mark.kwargs.get("alone"):
        return item.nodeid
    return f"{item.path}:{mark.args[0] if mark.args else ''}"


class _Recorder:
    """Measures processor time between reports, and writes a line for each."""

    def __init__(self, path: Path | None) -> None:
        self._file = None if path is None else path.open("a", buffering=1)  # a line each
        self._before_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._before_s = _used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now_s = _used_s()
        setattr(report, CPU_S, now_s - self._before_s)
        self._before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None:
            return
        line = [report.nodeid, round(report.duration, 3), round(getattr(report, CPU_S, 0.0), 3)]
        self._file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self) -> None:
        if self._file is not None:
            self._file.close()


def _used_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
