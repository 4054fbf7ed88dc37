# SPDX-License-Identifier: Apache-2.0
"""scripts/test-alone: what the fast tests find when they run alone, with a stand-in for these."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
COPIED = ("test-alone", "command_line/shell.sh")
TEST = """#!/bin/sh
cd "$(dirname "$0")/.."
pwd >{said}
echo "$@" >>{said}
ls >>{said}
python3 -c 'import sys; print(sys.prefix == sys.base_prefix, sys.version_info >= (3, 11))' >>{said}
env >>{said}
exit 7
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with the script, and tests that say what they find and fail."""
    root = tmp_path / "project"
    for name in COPIED:
        (root / "scripts" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SCRIPTS / name, root / "scripts" / name)
    (root / "scripts/test").write_text(TEST.format(said=tmp_path / "said"))
    (root / "scripts/test").chmod(0o755)
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(root), *words], check=True)


def commit(root: Path) -> None:
    """All that is there and not ignored."""
    git(root, "add", ".")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    git(root, *who, "commit", "-q", "-m", "all")


def test_nothing_of_this_checkout_or_this_shell_is_there(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / ".venv").mkdir()
    (project / "new.py").touch()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example.org")
    done = subprocess.run(
        [project / "scripts/test-alone", "--", "-k", "one"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 7, done.stderr
    place, words, *rest = (tmp_path / "said").read_text().splitlines()
    assert Path(place).is_relative_to(scratch)
    assert words == "--fast -- -k one"
    assert rest[:2] == ["scripts", "True True"], (
        "no file but those of the commit; no .venv's Python"
    )
    found = dict(line.partition("=")[::2] for line in rest[2:])
    assert "PYTHONPATH" not in found
    assert found["PIP_INDEX_URL"] == "https://index.example.org"
    assert not list(scratch.iterdir()), "it is removed afterwards"
    assert "not in the clone" in done.stderr


#: The module is older here than the C file that it is built from, as far as times tell.
SETUP = """#!/bin/sh
cd "$(dirname "$0")/.."
echo "$1" >te/core/one.x.so
echo "of Cython" >te/core/one.c
touch -d 2001-01-01 te/core/one.x.so
"""
COMPILED = """#!/bin/sh
cd "$(dirname "$0")/.."
cat te/core/one.x.so te/core/one.c >{said}
[ -e te/core/gone.x.so ] && echo "gone is there" >>{said}
[ te/core/one.pyx -nt te/core/one.c ] || [ te/core/one.c -nt te/core/one.x.so ] ||
  echo "up to date" >>{said}
"""


@pytest.fixture
def compiled(project: Path, tmp_path: Path) -> Path:
    """A project with a module to compile."""
    for top in ("te/core", "te_bench", "kvstore"):
        (project / top).mkdir(parents=True)
        (project / top / "one.pyx").touch()
    (project / "setup.py").touch()
    (project / ".gitignore").write_text("*.so\n*.c\n")
    (project / "scripts/setup").write_text(SETUP)
    (project / "scripts/setup").chmod(0o755)
    (project / "scripts/test").write_text(COMPILED.format(said=tmp_path / "said"))
    commit(project)
    return project


def test_what_is_compiled_here_is_up_to_date_there(compiled: Path, tmp_path: Path) -> None:
    (compiled / "te/core/gone.x.so").touch()  # of a module that the project has no more
    subprocess.run([compiled / "scripts/test-alone", "--compiled"], check=True, timeout=100)
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["fast", "of Cython", "up to date"]


@pytest.mark.parametrize("name", ["one.pyx", "new.pyx"])
def test_what_is_compiled_of_another_commit_is_not_copied(compiled: Path, name: str) -> None:
    (compiled / "te/core" / name).write_text("# changed, or not committed")
    done = subprocess.run(
        [compiled / "scripts/test-alone", "--compiled"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    assert "what is compiled here is not of this commit: commit te te_bench" in done.stderr
    assert not (compiled / "te/core/one.x.so").exists()
