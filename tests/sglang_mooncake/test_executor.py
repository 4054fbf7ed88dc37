# SPDX-License-Identifier: Apache-2.0
"""The executor: in order, never entered twice, no instruction lost to another one's failure."""

from __future__ import annotations

import logging

import pytest

from sglang_mooncake.executor import Executor


class Trace:
    """Rules and a shell out of a table: event → instructions; an instruction may submit an event,
    or raise."""

    def __init__(self, rules: dict[str, list[str]], causes: dict[str, str | Exception]) -> None:
        self.rules, self.causes = rules, causes
        self.seen: list[str] = []
        self.executor: Executor[str, str] = Executor(
            self.handle, self.perform, self.failed, clock=lambda: 7.0
        )

    def handle(self, event: str, now_s: float) -> list[str]:
        assert now_s == 7.0
        self.seen.append(event)
        if event == "bug":
            raise RuntimeError(event)
        return self.rules.get(event, [])

    def perform(self, instruction: str) -> None:
        self.seen.append(instruction)
        caused = self.causes.get(instruction)
        if isinstance(caused, Exception):
            raise caused
        if caused is not None:
            self.executor.submit(caused)

    def failed(self, cause: str, error: Exception) -> str | None:
        return None if cause.startswith("failed") else f"failed:{cause}:{error}"


def test_an_event_that_an_instruction_causes_waits_for_the_others_of_its_batch() -> None:
    trace = Trace({"a": ["fence", "tell"], "fenced": ["over"]}, {"fence": "fenced"})
    trace.executor.submit("a")
    assert trace.seen == ["a", "fence", "tell", "fenced", "over"]


def test_an_instruction_that_raises_drops_no_other_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trace = Trace({"a": ["fence", "tell"]}, {"fence": ValueError("late")})
    with caplog.at_level(logging.ERROR):
        trace.executor.submit("a")
    assert trace.seen == ["a", "fence", "tell", "failed:fence:late"]
    assert "could not carry out 'fence'" in caplog.text


def test_rules_that_raise_are_told_and_leave_the_executor_working() -> None:
    trace = Trace({}, {})
    trace.executor.submit("bug")
    trace.executor.submit("a")
    assert trace.seen == ["bug", "failed:bug:bug", "a"]


def test_a_failure_in_the_handling_of_a_failure_ends() -> None:
    trace = Trace({"a": ["x"], "failed:x:1": ["failed-too"]}, {})
    trace.causes = {"x": ValueError("1"), "failed-too": ValueError("2")}
    trace.executor.submit("a")
    assert trace.seen == ["a", "x", "failed:x:1", "failed-too"]
