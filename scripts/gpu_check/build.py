# SPDX-License-Identifier: Apache-2.0
"""te, compiled for this Python in a folder of its own: a copy of its sources, nothing of the
checkout is touched but that folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Final

__all__ = ["BuildError", "build"]

TIMEOUT_S: Final = 900
COMPILED: Final = (".so", ".pyc", ".o")


class BuildError(Exception):
    """It could not be compiled; the message has the end of what the compiler said."""


def build(root: Path, folder: Path, python: str) -> Path:
    """Where `import te` finds it; made anew only if the sources or the Python are other ones."""
    sources = _sources(root)
    name = _digest(root, sources, python)
    target = folder / name
    if (target / "built").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    for source in sources:
        copy = target / source.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
    # Without pyproject.toml: an older setuptools than a wheel needs is good enough.
    command = [python, "setup.py", "build_ext", "--inplace", "-j", str(os.cpu_count() or 1)]
    try:
        done = subprocess.run(
            command, cwd=target, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as exc:
        raise BuildError(f"it was not compiled within {TIMEOUT_S} s") from exc
    if done.returncode:
        (target / "build.log").write_text(done.stdout + done.stderr)
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BuildError(f"{' '.join(command)} failed (all of it: {target}/build.log):\n{tail}")
    shutil.rmtree(target / "build", ignore_errors=True)
    (target / "built").touch()
    return target


def _sources(root: Path) -> list[Path]:
    """Of te and te_bench. A generated .c file stands beside the .pyx file that it is made of."""
    return [
        root / "setup.py",
        *(
            path
            for top in ("te", "te_bench")
            for path in sorted((root / top).rglob("*"))
            if path.is_file()
            and path.suffix not in COMPILED
            and not (path.suffix == ".c" and path.with_suffix(".pyx").exists())
        ),
    ]


def _digest(root: Path, sources: list[Path], python: str) -> str:
    digest = hashlib.sha256(f"{python} {sysconfig.get_config_var('SOABI')}".encode())
    for path in sources:
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
