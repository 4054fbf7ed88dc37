# SPDX-License-Identifier: Apache-2.0
"""scripts/demo that is told to end: its servers end first."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDED = """
import runpy, signal, sys
from cpu_serving import hits_demo, store_demo, vllm_demo

def main(words):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        print("servers end")

hits_demo.main = store_demo.main = vllm_demo.main = main
sys.argv[1:] = [{option!r}]
runpy.run_module("cpu_serving", run_name="__main__")
"""


@pytest.mark.parametrize("option", ["--store", "--store-hits", "--vllm"])
def test_servers_end_before_a_demo_that_is_told_to(option: str) -> None:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    ended = subprocess.run(
        [sys.executable, "-c", path + ENDED.format(option=option)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == "servers end\n"
    assert (ended.returncode, ended.stderr) == (
        130,
        "demo: interrupted, all servers are stopped\n",
    )
