# SPDX-License-Identifier: Apache-2.0
"""scripts/nixl_tests.py runs tests that it is shown over te, and says whether they pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "nixl_tests.py"
GOOD = """
import nixl._bindings as bindings
from nixl._api import nixl_agent


def test_it_is_te():
    agent = nixl_agent("a")
    assert agent.get_agent_metadata().startswith(b"te-nixl")
    assert agent.get_plugin_list()[0] == "UCX"
"""
BAD = """
def test_bad():
    raise AssertionError("said by the test")
"""


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=100.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("second", "status"), [(GOOD, 0), (BAD, 1)])
def test_the_tests_run_over_te(tmp_path: Path, second: str, status: int) -> None:
    folder = tmp_path / "test" / "python"
    folder.mkdir(parents=True)
    (folder / "test_nixl_api.py").write_text(GOOD)
    (folder / "test_nixl_bindings.py").write_text(second)
    done = call(tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("said by the test" in done.stdout) == bool(status)


def test_a_folder_without_them_is_told(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert done.returncode == 2
    assert "has no test_nixl_api.py and test_nixl_bindings.py" in done.stderr
