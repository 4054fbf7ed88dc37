# SPDX-License-Identifier: Apache-2.0
"""scripts/docs builds the site, and refuses what would be broken on it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = [
    "CHANGELOG.md",
    "docs",
    "mkdocs.yml",
    "scripts/command_line",
    "scripts/docs",
    "scripts/docs-requirements.txt",
    "te",
]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def build(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / "scripts/docs")], capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def built() -> subprocess.CompletedProcess[str]:
    """The project's own pages; the first build installs the tools."""
    return build(ROOT)


@pytest.fixture(scope="module")
def copy(built: subprocess.CompletedProcess[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's pages, with the tools of its own build."""
    assert built.returncode == 0, built.stderr
    root = tmp_path_factory.mktemp("site")
    (root / "scripts").mkdir()
    (root / "build").mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
            shutil.copytree(ROOT / part, root / part, ignore=ignored)
        else:
            shutil.copy2(ROOT / part, root / part)
    (root / "build/docs-venv").symlink_to(ROOT / "build/docs-venv")
    return root


def test_the_site_is_built(built: subprocess.CompletedProcess[str]) -> None:
    assert built.returncode == 0, built.stderr
    assert "sglang-mooncake" in (ROOT / "build/site/index.html").read_text()


LINKS = """
[gone](gone.md)
[gone](security.md#gone)
![gone](gone.png)
"""


@pytest.mark.by_turns("broken")
@pytest.mark.parametrize(
    ("added", "said"),
    [
        (LINKS, ["gone.md", "#gone", "gone.png"]),
        ("::: te.Gone", ["te.Gone"]),
        ('<script src="https://example.org/x.js"></script>', ["from another server"]),
    ],
    ids=["links", "an object of te", "another server"],
)
def test_what_is_broken_on_a_page_fails_the_build(copy: Path, added: str, said: list[str]) -> None:
    page = copy / "docs/index.md"
    before = page.read_text()
    page.write_text(f"{before}\n{added}\n")
    try:
        done = build(copy)
    finally:
        page.write_text(before)
    assert done.returncode == 1
    assert [one for one in said if one not in done.stderr] == []


def test_an_unknown_argument_is_named() -> None:
    done = subprocess.run(
        [str(ROOT / "scripts/docs"), "--sreve"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "--sreve" in done.stderr
