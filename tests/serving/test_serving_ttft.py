# SPDX-License-Identifier: Apache-2.0
"""scripts/ttft for real: the smallest run that compares, and what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

ROOT = Path(__file__).parents[2]
MODULES = f"{ROOT / 'scripts'}:{ROOT / 'tests/support'}"
BOUND_S = 600.0
PROMPT, LAYERS, HIDDEN = 1024, 16, 256
UNUSABLE = 2


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ttft_bench", *argv],
        env={**os.environ, "PYTHONPATH": MODULES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Its output; the test is left out where there are no namespaces."""
    out, err = process.communicate(timeout=BOUND_S)
    if process.returncode == UNUSABLE:
        pytest.skip(err.strip())
    return out, err


def test_one_prompt_at_one_rate_with_one_server_and_by_layers(tmp_path: Path) -> None:
    file, plot = tmp_path / "ttft.json", tmp_path / "ttft.svg"
    model = ("--layers", str(LAYERS), "--hidden", str(HIDDEN), "--intermediate", "256")
    process = start(
        "--kinds", "one,layers", "--rate", "100mbit", "--prompt", str(PROMPT), "--rounds", "1",
        "--json", str(file), "--plot", str(plot), *model,
    )  # fmt: skip
    out, err = finish(process)
    assert process.returncode == 0, err
    assert "all tokens are equal" in out
    (point,) = json.loads(file.read_text())["points"]
    carried = point["carried"]["layers"]
    assert carried["nbytes"] >= PROMPT * LAYERS * 2 * HIDDEN * 4
    assert carried["early_nbytes"] > 0, "three times as long as the forward, and nothing left early"
    assert 0 < point["bytes_per_s"] * 8 / 100e6 < 1.05, "the limit limits, also beside other tests"
    assert plot.read_text().startswith("<svg")


def test_interrupt_ends_all_servers() -> None:
    process = start("--kinds", "one,pd", "--rate", "unlimited", "--prompt", "16")
    bench = psutil.Process(process.pid)
    deadline = time.monotonic() + BOUND_S
    while len(children := bench.children(recursive=True)) < 3:
        if process.poll() is not None:
            finish(process)
            pytest.fail("it ended before its servers had started")
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = finish(process)
    assert process.returncode == 130, err
    assert "interrupted, all servers are stopped" in err
    assert psutil.wait_procs(children, timeout=60)[1] == []
