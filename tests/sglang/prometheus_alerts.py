# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus with the project's alerts, whose minutes last seconds."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import metrics_doc
import requests
import yaml
from cpu_serving.ports import PortBlock
from rdma_testbed.packages import ensure_programs

__all__ = ["Prometheus", "install", "running"]

#: How long a minute of the rules lasts here.
MINUTE_S = 2
SCRAPE_S = 1
#: Of a machine that does much else meanwhile.
DEADLINE_S = 180


def install() -> None:
    """Debian's package has both programs."""
    ensure_programs(dict.fromkeys(("prometheus", "promtool"), "prometheus"), "the alerts' tests")


class Prometheus:
    """One that runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._deadline_s = time.monotonic() + DEADLINE_S

    def firing(self) -> dict[str, str]:
        """The alerts that fire now, by name, each with its sentence."""
        return {
            one["labels"]["alertname"]: one["annotations"]["summary"]
            for one in self._get("alerts")["alerts"]
            if one["state"] == "firing"
        }

    def watches(self, targets: int, usual: Callable[[], object]) -> set[str]:
        """Goes on with what is usual until all targets are there, and then for more than five of
        its minutes. Returns which alerts have fired in these.

        A machine that does much else may hold a target until a scrape is over: what fires in the
        five minutes behind that is right to, and they are watched once more."""
        self._until(
            lambda: self._number("count(up == 1)") == targets and not self.firing(),
            usual,
            "all targets are scraped, and nothing fires",
        )
        watched_s = 5 * MINUTE_S
        missed_s, fired_s = time.monotonic() - watched_s, dict[str, float]()

        def has_watched() -> bool:
            nonlocal missed_s
            now_s = time.monotonic()
            if self._number(f"count(min_over_time(up[{2 * MINUTE_S}s]) == 1)") != targets:
                missed_s = now_s
            fired_s.update(dict.fromkeys(self.firing(), now_s))
            is_scraped = self._number("min(count_over_time(up[1h]))") > watched_s / SCRAPE_S
            return is_scraped and now_s > missed_s + 2 * watched_s

        self._until(has_watched, usual, "the targets are scraped")
        for group in self._get("rules")["groups"]:
            for rule in group["rules"]:
                assert rule["health"] == "ok", rule.get("lastError")
        return {name for name, at_s in fired_s.items() if at_s > missed_s + watched_s}

    def until_firing(self, names: set[str], meanwhile: Callable[[], object]) -> dict[str, str]:
        """Waits until each of these alerts has fired; returns their sentences."""
        fired: dict[str, str] = {}

        def have_fired() -> bool:
            fired.update(self.firing())
            return names <= set(fired)

        self._until(have_fired, meanwhile, f"{sorted(names)} fire, but only {fired}")
        return {name: fired[name] for name in names}

    def until_answers(self, process: subprocess.Popen[bytes]) -> None:
        def answers() -> bool:
            assert process.poll() is None, f"prometheus has ended with code {process.returncode}"
            try:
                return requests.get(f"{self._url}/-/ready", timeout=DEADLINE_S).ok
            except requests.ConnectionError:
                return False

        self._until(answers, lambda: None, "prometheus answers")

    def _until(
        self, condition: Callable[[], bool], meanwhile: Callable[[], object], what: str
    ) -> None:
        while not condition():
            assert time.monotonic() < self._deadline_s, f"never happened: {what}"
            meanwhile()
            time.sleep(0.2)

    def _number(self, expression: str) -> float:
        """Of an expression that has one value; 0.0 while it has none."""
        found = self._get("query", {"query": expression})["result"]
        return float(found[0]["value"][1]) if found else 0.0

    def _get(self, what: str, params: Mapping[str, str] | None = None) -> dict[str, list]:
        answer = requests.get(f"{self._url}/api/v1/{what}", params, timeout=DEADLINE_S)
        answer.raise_for_status()
        return answer.json()["data"]


@contextmanager
def running(directory: Path, jobs: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """`jobs`: HOST:PORT of their targets, by the names that the rules know."""
    install()
    (directory / "alerts.yml").write_text(_shortened(metrics_doc.RULES.read_text()))
    every = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config = {
        "global": {**every, "scrape_timeout": f"{SCRAPE_S}s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {"job_name": name, "static_configs": [{"targets": list(targets)}]}
            for name, targets in jobs.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with PortBlock() as ports, (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{ports.first}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{ports.first}")
            prometheus.until_answers(process)
            yield prometheus
        finally:
            process.kill()
            process.wait(DEADLINE_S)


def _shortened(rules: str) -> str:
    return re.sub(r"\b(\d+)m\b", lambda found: f"{int(found[1]) * MINUTE_S}s", rules)
