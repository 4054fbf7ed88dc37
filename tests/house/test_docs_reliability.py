# SPDX-License-Identifier: Apache-2.0
"""docs/reliability.md: each promise names tests that hold it, and they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from chaos_run.compare import header as compared
from chaos_run.schedule import SHARED
from healing_run.figures import header as healed
from healing_run.rows import NAMES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs/reliability.md").read_text()
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PROMISES = "## What is promised"


def section(title: str) -> str:
    """The text below a title, up to the next one of its kind."""
    assert f"\n{title}\n" in PAGE
    return PAGE.partition(f"\n{title}\n")[2].partition("\n## ")[0]


def promises() -> list[str]:
    return re.findall(r"^\* .*(?:\n  .*)*", section(PROMISES), re.MULTILINE)


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {
        one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_there_are_promises() -> None:
    assert len(promises()) > 10


@pytest.mark.parametrize("promise", promises(), ids=lambda text: text[2:60])
def test_each_promise_names_tests_that_are_there(promise: str) -> None:
    named = NAMED.findall(promise)
    assert named, "no test holds it"
    for path, name in named:
        assert name in functions(path), f"{path} has no {name}"


def test_every_test_that_the_page_names_is_there() -> None:
    assert len(re.findall(r"::test_", PAGE)) == len(NAMED.findall(PAGE))
    for path, name in NAMED.findall(PAGE):
        assert name in functions(path), f"{path} has no {name}"


@pytest.mark.parametrize("header", [compared(), healed()])
def test_tables_are_those_of_the_scripts(header: list[str]) -> None:
    assert header[0] in PAGE


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_the_figures_in_the_readme_are_those_of_the_table() -> None:
    """Medians; who never served again has none."""
    names, _, *rows = [line for line in section("## Beside others").splitlines() if line[:1] == "|"]
    table = {row[0]: dict(zip(cells(names), row, strict=True)) for row in map(cells, rows)}
    shown = re.findall(r"^\| [^|]+\((`\w+`)\) \| (.+) \|$", README, re.MULTILINE)
    assert len(shown) >= 4
    for kind, told in shown:
        for backend, figure in zip(("ours", "mooncake", "nixl"), told.split(" | "), strict=True):
            median = table[backend][kind].partition(" ")[0]
            assert figure.strip("*") == {"never": "not without a restart"}.get(median, median)


def test_each_row_is_a_fault_of_the_script() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| [\d–]", section("## Healing"), re.MULTILINE)
    assert rows
    assert set(rows) <= set(NAMES)
    assert all(f"`{kind}`" in section("## Beside others") for kind in SHARED)
