# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md and the dashboard say what the code has."""

from __future__ import annotations

import json
import re

import metrics_doc

from bootstrap_server import metrics as registry
from kvstore import metrics as store
from sglang_mooncake import metrics as ranks

NAMES = (
    {ranks.PREFIX + one.name for one in ranks.METRICS}
    | {store.PREFIX + one.name for one in store.METRICS}
    | {registry.PREFIX + name for name in registry.METRICS}
)
HISTOGRAMS = {ranks.PREFIX + one.name for one in ranks.METRICS if one.kind == "histogram"}


def named_in(text: str) -> set[str]:
    """Metrics that expressions name, histograms by their own name."""
    found = set(re.findall(r"(?:sglang_mooncake|kvstore)_[a-z_]+", text))
    for name in HISTOGRAMS:
        found = {name if one in (f"{name}_bucket", f"{name}_sum") else one for one in found}
    return found


def test_the_page_is_what_the_code_says():
    assert metrics_doc.PATH.read_text() == metrics_doc.document(), (
        "docs/metrics.md is not what the code says; run: .venv/bin/python scripts/metrics_doc.py"
    )


def test_alerts_name_metrics_that_there_are():
    text = metrics_doc.TEXT.read_text()
    rules = [line for line in text.splitlines() if "expr:" in line]
    assert len(rules) >= 5
    for line in rules:
        assert named_in(line) <= NAMES, line


def test_the_dashboard_shows_every_metric_and_no_other():
    board = json.loads(metrics_doc.DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown: set[str] = set()
    for panel in panels:
        for target in panel.get("targets", ()):
            assert named_in(target["expr"]) <= NAMES, panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")")
            shown |= named_in(target["expr"])
    assert shown == NAMES
    variables = {one["name"]: one["type"] for one in board["templating"]["list"]}
    assert variables["datasource"] == "datasource"
    used = set(re.findall(r"\$\{?([a-z]+)\b", metrics_doc.DASHBOARD.read_text()))
    assert used <= set(variables)
    assert board["schemaVersion"] >= 39


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(metrics_doc.DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
