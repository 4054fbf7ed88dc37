# SPDX-License-Identifier: Apache-2.0
"""Lines that others can cause come seldom, and none is forgotten."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rate_limited_log import LOG_EVERY_S, RateLimitedLog

logger = logging.getLogger(__name__)


def test_the_next_line_counts_those_that_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    seldom = RateLimitedLog(logger, lambda: now_s)
    for number in range(3):
        seldom.warn("%d of %s", number, "100 %")
    now_s += LOG_EVERY_S
    seldom.warn("another")
    now_s += LOG_EVERY_S
    seldom.warn("the last")
    assert caplog.messages == [
        "0 of 100 %",
        "another (2 more such lines were left out)",
        "the last",
    ]


class Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, _: logging.LogRecord) -> None:
        self.count += 1


@given(st.lists(st.floats(0.0, 10.0), max_size=100))
def test_there_is_a_line_in_five_seconds_at_most(pauses: list[float]) -> None:
    now_s, counting = 0.0, Counting()
    seldom = RateLimitedLog(logger, lambda: now_s)
    logger.addHandler(counting)
    for pause_s in pauses:
        now_s += pause_s
        seldom.warn("a line")
    logger.removeHandler(counting)
    assert counting.count <= now_s / LOG_EVERY_S + 1
