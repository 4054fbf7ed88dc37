# SPDX-License-Identifier: Apache-2.0
"""Which Pythons scripts/wheel builds for: all that are wanted, or none."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Machine:
    """Programs on the path, beside those of the system; each refuses to do more than say its
    version, so that nothing is built."""

    bin: Path

    def has(self, name: str, version: str | None) -> Path:
        """A Python, or a program of that name that does not run."""
        program = self.bin / name
        program.parent.mkdir(parents=True, exist_ok=True)
        says = f'[ "$1" = -c ] && echo {version} && exit 0' if version else ""
        program.write_text(f"#!/bin/sh\n{says}\nexit 9\n")
        program.chmod(0o755)
        return program

    def wheel(self, *arguments: str) -> list[str]:
        """What scripts/wheel says before it would build; it fails in any case."""
        done = subprocess.run(
            ["/bin/bash", str(ROOT / "scripts/wheel"), *arguments],
            env={"PATH": f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode
        assert not done.stdout
        return done.stderr.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """The system's own Pythons do not count, whichever there are."""
    one = Machine(tmp_path)
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        one.has(name, None)
    one.has("pyenv", None)
    return one


def test_every_python_is_found_before_the_first_is_used(machine: Machine) -> None:
    first = machine.has("first", "3.11")
    second = machine.has("python3.12", "3.12")
    said = machine.wheel("first", "3.12")
    assert said[:2] == [f"wheel: Python 3.11 is {first.name}", f"wheel: Python 3.12 is {second}"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("3.13", "no Python 3.13: neither python3.13 on the path nor a 3.13 of pyenv runs"),
        ("nothing", "nothing is no Python that runs"),
        ("old", "old is Python 3.10, not 3.11 or newer"),
        ("again", "again and first are both Python 3.11"),
    ],
)
def test_a_python_that_is_not_there_is_an_error(machine: Machine, wanted: str, said: str) -> None:
    machine.has("first", "3.11")
    machine.has("old", "3.10")
    machine.has("again", "3.11")
    (line,) = machine.wheel("first", wanted)
    assert said in line


def test_an_option_that_it_does_not_know_is_an_error(machine: Machine) -> None:
    (line,) = machine.wheel("--chek")
    assert line.startswith("wheel: unknown option '--chek'; usage: scripts/wheel [--check]")


def test_one_more_is_the_newest_other_one(machine: Machine) -> None:
    machine.has("first", "3.11")
    for version in ("3.11", "3.12", "3.13"):
        machine.has(f"python{version}", version)
    said = machine.wheel("--one-more", "first")
    assert said[1] == f"wheel: Python 3.13 is {machine.bin}/python3.13"
    said = machine.wheel("--one-more", "3.13")
    assert said[1] == f"wheel: Python 3.12 is {machine.bin}/python3.12"


def test_one_more_may_be_one_of_pyenv(machine: Machine) -> None:
    machine.has("first", "3.12")
    root = machine.bin / "pyenv-root"
    machine.has("pyenv", None).write_text(f"#!/bin/sh\n[ $1 = root ] && echo {root}\n")
    program = machine.has("pyenv-root/versions/3.13.0/bin/python", "3.13")
    assert f"wheel: Python 3.13 is {program}" in machine.wheel("--one-more", "first")


def test_it_says_that_there_is_no_other_one(machine: Machine) -> None:
    machine.has("first", "3.12")
    said = machine.wheel("--one-more", "first")
    assert said[0] == "wheel: no other Python of 3.13 3.12 3.11 is here"
    assert said[1] == "wheel: Python 3.12 is first"
