# SPDX-License-Identifier: Apache-2.0
"""The tests of te on a data plane that was built with a sanitizer."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1800.0


@pytest.mark.sanitize
@pytest.mark.timeout(DEADLINE_S + 60)
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_no_sanitizer_has_anything_to_say(kind: str) -> None:
    process = subprocess.Popen(
        [ROOT / "scripts/sanitize", kind],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, said[-20_000:]
