# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md and the dashboard say what the code has."""

from __future__ import annotations

import json
import re
from typing import Any

import metrics_doc
import yaml

from bootstrap_server import build
from bootstrap_server.http import metrics as registry
from kvstore.metrics import table as store
from sglang_mooncake import metrics as ranks
from sglang_mooncake.rooms.states import ENDS
from sglang_mooncake.router import metrics as router

NAMES = (
    {ranks.PREFIX + one.name for one in ranks.METRICS}
    | {store.PREFIX + one.name for one in store.METRICS}
    | {registry.PREFIX + name for name in registry.METRICS}
    | {router.PREFIX + one.name for one in router.METRICS}
    | {build.NAME}
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


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(metrics_doc.RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_name_metrics_that_there_are():
    for rule in rules():
        assert named_in(rule["expr"]) <= NAMES, rule["alert"]
        assert named_in(rule["expr"]) or re.search(r"\bup\{", rule["expr"]), rule["alert"]


def test_alerts_name_labels_that_there_are():
    """A rule that asks for a label or an end which nobody tells is silent for ever."""
    known = {"role", "job", "instance", "le", *ranks.RANK_LABELS}
    for one in (*ranks.METRICS, *store.METRICS, *router.METRICS):
        known |= set(one.labels)
    ends = {end.value for end in ENDS}
    for rule in rules():
        asked = re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', rule["expr"])
        for name, _, values in asked:
            assert name in known | {"event"}, rule["alert"]
            told = {"end": ends, "event": set(registry.EVENTS)}.get(name)
            assert told is None or set(values.split("|")) <= told, rule["alert"]
        shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        assert set(shown) <= known, rule["alert"]


def test_alerts_name_jobs_that_the_page_has_prometheus_scrape():
    jobs = set(re.findall(r"job_name: (\S+)", metrics_doc.TEXT.read_text()))
    asked = {
        job
        for rule in rules()
        for values in re.findall(r'\bjob=~?"([^"]*)"', rule["expr"])
        for job in values.split("|")
    }
    assert asked == jobs


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
