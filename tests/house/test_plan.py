# SPDX-License-Identifier: Apache-2.0
"""The commands of scripts/test."""

from __future__ import annotations

from pathlib import Path

from testrun.plan import FAST, Options, fast_lanes


def test_the_fast_tests_are_compiled_before_their_workers_begin() -> None:
    _, tests = fast_lanes(Options(root=Path("/root"), scratch=Path("/root/build"), fast=True))
    _, compiling, running = tests.steps
    assert {"--collect-only", *FAST} <= set(compiling.argv), "the same files are read"
    assert "-n" not in compiling.argv
    assert {"-n", *FAST} <= set(running.argv)
