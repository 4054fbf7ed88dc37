# SPDX-License-Identifier: Apache-2.0
"""Ports of servers that several processes start side by side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cpu_serving.ports
import pytest
from cpu_serving.ports import PortBlock
from cpu_serving.processes import ServingError

OTHER = """
import os, sys
os.getpid = lambda: int(sys.argv[1])  # it begins to look where we do
from cpu_serving.ports import PortBlock
block = PortBlock()
print(block.first, flush=True)
sys.stdin.read()
"""


def test_nobody_gets_a_block_before_it_is_given_back() -> None:
    with PortBlock() as first, PortBlock() as second:
        assert first.first != second.first
    with PortBlock() as again:
        assert again.first == first.first


def test_processes_side_by_side_get_different_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_serving.ports.os, "getpid", lambda: 7)
    scripts = str(Path(cpu_serving.ports.__file__).parents[1])
    with PortBlock() as ours:
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER, "7"],
            env={"PYTHONPATH": scripts},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with other:
            assert other.stdout is not None
            theirs = int(other.stdout.readline())
            other.communicate("")
    assert theirs != ours.first


def test_no_free_block_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with PortBlock() as ours:
        monkeypatch.setattr(cpu_serving.ports, "FIRST_PORT", ours.first)
        monkeypatch.setattr(cpu_serving.ports, "LAST_PORT", ours.first + 1)
        with pytest.raises(ServingError, match="no block of 400 free ports"):
            PortBlock()
