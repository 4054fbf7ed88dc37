# SPDX-License-Identifier: Apache-2.0
"""scripts/page_pictures.py takes the pictures that docs/registry.md shows."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Chromium is installed where it is missing, and starts in seconds.
pytestmark = [pytest.mark.slow, pytest.mark.by_turns, pytest.mark.timeout(600)]


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, in pixels."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_the_pictures_can_be_taken_anew(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/page_pictures.py", "--to", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"\(images/([\w-]+\.png)\)", (ROOT / "docs/registry.md").read_text())
    assert {path.name for path in tmp_path.iterdir()} == set(shown)
    for name in shown:
        assert size(tmp_path / name) == size(ROOT / "docs/images" / name)
