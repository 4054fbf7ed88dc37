# SPDX-License-Identifier: Apache-2.0
"""What the scripts have in common that run others' tests over te or the store. These tests are not
part of this repository: they lie in a folder that the caller names."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from command_line import Parser

__all__ = ["ROOT", "environment", "folder_of", "name_of", "parser_of", "run_pytest"]

ROOT: Final = Path(__file__).resolve().parents[2]


def parser_of(script: str, says: str) -> Parser:
    """Takes FOLDER. ``script``: its path."""
    parser = Parser(
        f".venv/bin/python scripts/{Path(script).name}",
        says,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER")
    return parser


def name_of(parser: Parser) -> str:
    """By which a script calls itself in messages."""
    return Path(parser.prog.split()[-1]).stem


def folder_of(
    parser: Parser, given: Path | None, whose: str, files: Iterable[str], places: Iterable[str]
) -> Path:
    """Where the files are: one of these places below the given folder. Without, the script ends
    with status 2 and a sentence."""
    if given is None:
        parser.error(f"name the folder of {whose} checkout")
    names = tuple(files)
    for folder in (given / place for place in places):
        if all((folder / name).is_file() for name in names):
            return folder
    sys.stderr.write(f"{name_of(parser)}: {given} has no {' and '.join(names)}\n")
    raise SystemExit(2)


def environment(**ours: str) -> dict[str, str]:
    """Of the tests' process: there NIXL and Mooncake are te and the store. ``ours``: settings."""
    from sglang_mooncake.sglang.running import environment_for

    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return dict(environment_for(os.environ | {"PYTHONPATH": path} | ours))


def run_pytest(
    name: str,
    folder: Path,
    files: Sequence[str],
    given: Mapping[str, str],
    timeout_s: float,
    left_out: Sequence[str] = (),
) -> int:
    """The exit status of pytest, which knows nothing of this project's settings, nor of a
    conftest.py above the folder; 1 if it takes too long. What is installed comes before modules
    that lie beside the tests. ``name``: of the script. ``left_out``: tests, as FILE::NAME."""
    argv = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    argv += ["-c", os.devnull, "--rootdir", str(folder), "--confcutdir", str(folder)]
    argv += ["--import-mode", "append", *files]
    argv += [f"--deselect={one}" for one in left_out]
    try:
        return subprocess.run(argv, cwd=folder, env=dict(given), timeout=timeout_s).returncode
    except subprocess.TimeoutExpired:
        said = f"{' and '.join(files)} have not ended within {timeout_s:g} s"
        sys.stderr.write(f"{name}: {said}\n")
        return 1
