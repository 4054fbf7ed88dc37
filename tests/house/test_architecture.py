# SPDX-License-Identifier: Apache-2.0
"""docs/architecture.md names files that are there, and every file of the hand-over."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()
FOLDERS = (
    "bootstrap_server",
    "docs",
    "kvstore",
    "kvstore_tools",
    "scripts",
    "sglang_mooncake",
    "te",
    "te_bench",
    "tests",
)
NAMED = re.compile(r"`([\w./-]+\.(?:py|pyx|pxd|pxi|h|c|md|config))`|\]\(([\w.-]+\.md)\)")


def files() -> list[str]:
    """All of the project, by their paths."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return [path.relative_to(ROOT).as_posix() for path in found]


def test_every_file_that_is_named_exists() -> None:
    named = {first or second for first, second in NAMED.findall(TEXT)}
    assert len(named) > 100, "the pattern finds names"
    paths = [f"/{path}" for path in files()]
    missing = sorted(name for name in named if not any(p.endswith(f"/{name}") for p in paths))
    assert not missing, "files that docs/architecture.md names and that are not there"


def test_the_tables_of_the_hand_over_have_every_module() -> None:
    begin, end = (TEXT.index(head) for head in ("### Files of the neutral part", "### How it"))
    listed = {f"sglang_mooncake/{first}" for first, _ in NAMED.findall(TEXT[begin:end])}
    modules = {
        path
        for path in files()
        if path.startswith("sglang_mooncake/")
        and path.endswith(".py")
        and not path.endswith("/__init__.py")
    }
    assert listed == modules, "modules that have no line in the tables, or lines without a module"
