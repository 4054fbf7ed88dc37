# SPDX-License-Identifier: Apache-2.0
"""scripts/demo that is told to end: its servers end first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = ["--store", "--store-hits", "--vllm"]
#: Each demo in a process of its own. It is forked from one that has imported them all: importing
#: takes most of the time. What it says goes to files.
ENDED = """
import os, runpy, signal, sys
from cpu_serving import hits_demo, store_demo, vllm_demo

def main(words):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        print("servers end")

hits_demo.main = store_demo.main = vllm_demo.main = main
for option in {options}:
    child = os.fork()
    if not child:
        for number in (1, 2):
            os.dup2(os.open(f"{{option}}.{{number}}", os.O_CREAT | os.O_WRONLY), number)
        sys.argv[1:] = [option]
        runpy.run_module("cpu_serving", run_name="__main__")
        raise AssertionError("that exits")
    _, status = os.waitpid(child, 0)
    with open(f"{{option}}.status", "w") as file:
        print(os.waitstatus_to_exitcode(status), file=file)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each of them said, and its exit status."""
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    folder = tmp_path_factory.mktemp("ended")
    program = path + ENDED.format(options=OPTIONS)
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("option", OPTIONS)
def test_servers_end_before_a_demo_that_is_told_to(ended: Path, option: str) -> None:
    said = [(ended / f"{option}.{name}").read_text() for name in (1, 2, "status")]
    assert said == ["servers end\n", "demo: interrupted, all servers are stopped\n", "130\n"]
