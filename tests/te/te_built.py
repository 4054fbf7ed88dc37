# SPDX-License-Identifier: Apache-2.0
"""Libraries in C that stand in for something, compiled once for all processes of the tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

__all__ = ["built_once"]

ROOT: Final = Path(__file__).parents[2]
#: A folder for each state of the sources. One takes half a second of processor time to compile,
#: and every worker of the tests and every process that these start loads it.
BUILT: Final = ROOT / "build/stand-ins"


def built_once(sources: Iterable[Path], build: Callable[[Path], object]) -> Path:
    """The folder with what ``build`` has made in it, now or before: another one when a source, a
    header of te's, the compiler or its flags have changed."""
    folder = BUILT / _digest([*sources, *(ROOT / "te").rglob("*.h")])
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            build(made)
            try:
                made.rename(folder)
            except OSError:  # Another process was faster, and what it has made is the same.
                if not folder.exists():
                    raise
    return folder


def _digest(sources: Iterable[Path]) -> str:
    found = hashlib.sha256(os.environ.get("CFLAGS", "").encode())  # of a sanitizer's build
    compiler = Path(shutil.which("cc") or "/").stat()
    found.update(f"{compiler.st_ino} {compiler.st_size} {compiler.st_mtime_ns}".encode())
    for source in sorted(sources):
        text = source.read_bytes()
        found.update(f"\n{source.name} {len(text)}\n".encode() + text)
    return found.hexdigest()[:32]
