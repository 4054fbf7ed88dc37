# SPDX-License-Identifier: Apache-2.0
"""Writes docs/metrics.md: the text of metrics_doc.in.md with the tables of metrics of the code."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    Parser(".venv/bin/python scripts/metrics_doc.py", __doc__).parse_args()

from bootstrap_server.http import metrics as registry
from kvstore.metrics import table as store
from sglang_mooncake import metrics as ranks
from sglang_mooncake.router import metrics as router

TEXT = Path(__file__).with_name("metrics_doc.in.md")
PATH = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
DASHBOARD = PATH.parent / "grafana" / "sglang-mooncake.json"
RULES = DASHBOARD.with_name("alerts.yml")


def document() -> str:
    """The text of docs/metrics.md."""
    text = TEXT.read_text()
    for name, table in (
        ("RANKS", _ranks()),
        ("STORE", _store()),
        ("REGISTRY", _registry()),
        ("ROUTER", _table(router.PREFIX, router.METRICS)),
        ("RULES", _indented(_without_comments(RULES.read_text()))),
    ):
        text = text.replace(f"{{{{{name}}}}}", table)
    return text


def _ranks() -> str:
    return _table(ranks.PREFIX, ranks.METRICS)


def _store() -> str:
    return _table(store.PREFIX, store.METRICS)


def _table(prefix: str, metrics: Iterable[ranks.Metric | store.Metric | router.Metric]) -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for one in metrics:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        lines.append(f"| `{prefix}{one.name}` | {one.kind} | {labels} | {one.help} |")
    return "\n".join(lines)


def _registry() -> str:
    lines = ["| metric | type | meaning |", "|---|---|---|"]
    for name, metric in registry.METRICS.items():
        lines.append(f"| `{registry.PREFIX}{name}` | {metric.kind} | {metric.help} |")
    return "\n".join(lines)


def _without_comments(text: str) -> str:
    """The page says what they say; an indented line with a # is a command for root there."""
    return "".join(line for line in text.splitlines(True) if not line.startswith("#"))


def _indented(text: str) -> str:
    """As code."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


if __name__ == "__main__":
    PATH.write_text(document())
