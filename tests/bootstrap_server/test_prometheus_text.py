# SPDX-License-Identifier: Apache-2.0
"""Prometheus' text format. That a real Prometheus reads it: tests/sglang/test_alerts.py."""

from __future__ import annotations

import pytest

from bootstrap_server.prometheus_text import family


def test_a_metric_without_labels() -> None:
    lines = list(family("ranks", "gauge", "Ranks.", (), {(): 3}))
    assert lines == ["# HELP ranks Ranks.", "# TYPE ranks gauge", "ranks 3"]


def test_each_combination_of_labels_has_a_line() -> None:
    values = {("a", "200"): 1, ("b", "404"): 0.5}
    *_, first, second = family("asked", "counter", "Asked.", ("route", "status"), values)
    assert first == 'asked{route="a",status="200"} 1'
    assert second == 'asked{route="b",status="404"} 0.5'


def test_a_metric_that_has_not_been_counted_is_still_named() -> None:
    assert len(list(family("asked", "counter", "Asked.", ("route",), {}))) == 2


def test_what_would_end_a_label_or_a_line_is_escaped() -> None:
    text = 'a\\b"c\nd'
    help_line, _, line = family("told", "gauge", text, ("what",), {(text,): 1})
    assert help_line == r'# HELP told a\\b"c\nd'
    assert line == r'told{what="a\\b\"c\nd"} 1'


def test_labels_without_a_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        list(family("told", "gauge", "Told.", ("one",), {("a", "b"): 1}))
