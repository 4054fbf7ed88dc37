# SPDX-License-Identifier: Apache-2.0
"""The command that measures the store with many owners, with few of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rdma_testbed.packages import ensure_programs

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "store_scale.py"
OWNERS = 60


@pytest.mark.slow
@pytest.mark.by_turns
def test_all_owners_are_followed_and_all_objects_are_there() -> None:
    ensure_programs({"redis-server": "redis-server"}, "scripts/store_scale.py")
    given = {"--owners": OWNERS, "--objects": 30_000, "--changes": 200, "--seconds": 2}
    words = [str(word) for pair in given.items() for word in pair]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["table"]["objects"] == 30_000
    assert found["client"]["silent_owners"] == 0
    assert found["client"]["changes_per_s"] > 0
    assert found["owner"]["changes_per_s"] > 0
    assert found["index"]["renewal_us"] > 0
