# SPDX-License-Identifier: Apache-2.0
"""README.md: its figures are those of docs/benchmarks.md, and its links lead somewhere. Links of
the pages below docs/ are checked by scripts/docs."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
#: A row of a case in the comparison: the link to its table, and a cell for each engine.
CASE = re.compile(
    r"^\| \[[^]]+\]\(docs/benchmarks\.md#([\w-]+)\) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE
)


def anchor(heading: str) -> str:
    """GitHub's: lower case, no punctuation, dashes for spaces."""
    kept = (c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
    return "".join(kept).strip().replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """The text below each heading, by its anchor."""
    parts = re.split(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {anchor(head): body for head, body in zip(parts[1::2], parts[2::2], strict=True)}


def test_the_figures_of_the_comparison_are_those_of_its_tables() -> None:
    tables = sections(BENCHMARKS)
    cases = CASE.findall(README)
    assert len(cases) >= 5
    for link, *cells in cases:
        for engine, cell in zip(("te", "mooncake", "nixl"), cells, strict=True):
            value = re.search(r"[0-9.]+", cell)
            assert value
            rows = re.findall(
                rf"^\| {engine}(?:-pool)?(?: \*)? \|(.+)$", tables[link], re.MULTILINE
            )
            told = {text.strip() for row in rows for text in row.split("|")}
            assert value[0] in told, f"{link}: {engine} has {sorted(told)}"


def test_links_lead_to_files_and_headings() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 10
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, head = link.partition("#")
        path = ROOT / (name or "README.md")
        assert path.is_file(), link
        if head:
            assert head in sections(path.read_text()), link


def test_the_commands_that_ci_runs_are_there() -> None:
    assert re.search(r"^    scripts/demo$", README, re.MULTILINE)
    assert re.search(r"^    scripts/test( |$)", README, re.MULTILINE)
