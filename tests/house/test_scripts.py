# SPDX-License-Identifier: Apache-2.0
"""Every script says what it does, and refuses what it does not know, where nothing is installed or
built, and before it sets anything up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_serving.options import TRANSPORTS

import te.config

SCRIPTS = Path(__file__).parents[2] / "scripts"
#: What a person calls: folders have the parts of one script, or of several.
NAMES = sorted(p.name for p in SCRIPTS.iterdir() if p.is_file() and p.suffix in ("", ".py"))
UNKNOWN = "--no-such-option"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that is nothing but scripts, beside a Python without any package."""
    place = tmp_path_factory.mktemp("bare")
    for name in ("bin", "home", "tmp"):
        (place / name).mkdir()
    for name in ("scripts", "tests/support"):
        shutil.copytree(
            SCRIPTS.parent / name,
            place / "checkout" / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    python = place / "bin/python3"
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    python.write_text(f'#!/bin/sh\nexec {base} -S "$@"\n')
    python.chmod(0o755)
    return place


def call(bare: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a script there, and looks that no file was written, changed or left."""
    path = bare / "checkout/scripts" / name
    python = [] if os.access(path, os.X_OK) else [str(bare / "bin/python3")]
    before = files(bare)
    done = subprocess.run(
        [*python, str(path), *words],
        cwd=bare / "home",
        env={
            "PATH": f"{bare / 'bin'}:/usr/bin:/bin",
            "HOME": str(bare / "home"),
            "TMPDIR": str(bare / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert files(bare) == before, "files that were there, and files that are"
    return done


def files(place: Path) -> dict[str, int]:
    found = {str(path): path.stat() for path in place.rglob("*")}
    return {name: one.st_mtime_ns for name, one in found.items()}


def test_all_scripts_are_found() -> None:
    assert {"demo", "setup", "test", "wheel", "wire_doc.py"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_script_says_what_it_does(bare: Path, name: str) -> None:
    done = call(bare, name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    usage, _, text = done.stdout.partition("\n")
    assert usage.startswith("usage: ")
    assert f"scripts/{name}" in usage
    assert text.strip(), "it says more than how it is called"


@pytest.mark.parametrize("name", NAMES)
def test_a_script_refuses_what_it_does_not_know(bare: Path, name: str) -> None:
    done = call(bare, name, UNKNOWN)
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.splitlines()[-1]
    assert said.split(": ")[0] in name, "wheel-demo lets the demo's command line answer"
    assert UNKNOWN in said


@pytest.mark.parametrize("variant", ["--store", "--store-hits", "--vllm"])
def test_what_the_demo_shows_besides_has_options_of_its_own(bare: Path, variant: str) -> None:
    done = call(bare, "demo", variant, "--help")
    assert done.stdout.startswith(f"usage: scripts/demo {variant} ")
    done = call(bare, "demo", variant, "--decode-pp", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("demo: ")


def test_what_follows_two_dashes_is_for_another_program(bare: Path) -> None:
    """Here pytest would be asked, if there were one."""
    done = call(bare, "sanitize", "address", "--", "--help")
    assert done.returncode not in (0, 2)
    assert "usage: scripts/sanitize" not in done.stdout + done.stderr


def test_the_demo_knows_the_transports_of_te() -> None:
    """Its command line is read before te is compiled."""
    assert TRANSPORTS == te.config.TRANSPORTS
