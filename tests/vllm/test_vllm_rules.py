# SPDX-License-Identifier: Apache-2.0
"""vLLM's own scheduler, configuration and aggregator with both halves of the connector for prefill
and decode servers: what its rules for connectors ask for, with several TP ranks. Run in vLLM's
environment (`tests/support/vllm_rules/rules.py`)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from cpu_serving.vllm_servers import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_the_rules_of_vllms_scheduler_are_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vllm_rules"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests/support")},
        capture_output=True,
        text=True,
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
