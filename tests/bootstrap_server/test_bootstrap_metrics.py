# SPDX-License-Identifier: Apache-2.0
"""What Prometheus is told of a registry."""

from __future__ import annotations

import os
import re

import pytest
import requests
from bootstrap_waits import NEVER_S, WAIT_S

from bootstrap_server import BootstrapClient, BootstrapServer, RankCoords, Topology
from bootstrap_server.admission import allowance
from bootstrap_server.admission.secret import Keys
from bootstrap_server.build import version
from bootstrap_server.http.metrics import EVENTS, METRICS, PREFIX, Counts, process_lines, text

KEYS = Keys.from_secrets([b"s3cret-" + b"0123456789abcdef" * 4])
ALONE, FIRST = Topology(1, 1, 1, 1), RankCoords(0, 0, 0, 0)
LINE = re.compile(r"([a-z_]+)(\{.*\})? (\S+)")


def parsed(answer: str) -> dict[str, float]:
    """Values by name and labels; every line must be one of the format."""
    found = {}
    for line in answer.splitlines():
        if line.startswith("# "):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        found[match[1] + (match[2] or "")] = float(match[3])
    return found


def scrape(server: BootstrapServer, **options) -> dict[str, float]:
    answer = requests.get(f"http://{server.host}:{server.port}/metrics", timeout=30, **options)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return parsed(answer.text)


def test_every_metric_is_told_with_its_help_and_type():
    counts = Counts()
    counts.answered("/route", "GET", 200, 0.25)
    counts.answered("/route", "GET", 200, 0.5)
    counts.answered("other", "GET", 404, 0.0)
    answer = text(counts, [(2, 4), (3, 3), (0, 8)], [(1, 2), (0, 2)], 3, {"registered": 5}, 7, [])
    for name, metric in METRICS.items():
        assert f"# HELP {PREFIX}{name} {metric.help}\n# TYPE {PREFIX}{name} {metric.kind}" in answer
    assert parsed(answer) == {
        PREFIX + 'requests_total{route="/route",method="GET",status="200"}': 2,
        PREFIX + 'requests_total{route="other",method="GET",status="404"}': 1,
        PREFIX + 'request_seconds_total{route="/route"}': 0.75,
        PREFIX + 'request_seconds_total{route="other"}': 0,
        PREFIX + "ranks": 5,
        PREFIX + "ranks_expected": 7,
        PREFIX + "decode_ranks": 1,
        PREFIX + "decode_ranks_expected": 2,
        PREFIX + "ranks_gone": 3,
        PREFIX + "instances": 2,
        PREFIX + "instances_ready": 1,
        **{f'{PREFIX}rank_events_total{{event="{what}"}}': 0 for what in EVENTS},
        PREFIX + 'rank_events_total{event="registered"}': 5,
        PREFIX + "connections": 7,
    }


def test_the_process_is_told_of():
    told = parsed("\n".join(process_lines()))
    assert told["process_open_fds"] >= 3
    assert told["process_resident_memory_bytes"] > 1 << 20
    assert 0 < told["process_cpu_seconds_total"] < sum(os.times()) + 1


def test_a_registry_counts_ranks_requests_and_strangers(make_record):
    with BootstrapServer("127.0.0.1", 0, NEVER_S, keys=KEYS.registry) as server:
        address = f"{server.host}:{server.port}"
        with BootstrapClient(address, WAIT_S, keys=KEYS.registry) as client:
            client.register(make_record(ALONE, FIRST), 30.0)
            for _ in range(3):
                requests.get(f"http://{address}/v1/instances", timeout=30)  # a stranger
            requests.get(f"http://{address}/no/such/{'x' * 50}", timeout=30)
            told = scrape(server)
            assert told[PREFIX + "ranks"] == 1
            assert told[PREFIX + 'rank_events_total{event="registered"}'] == 1
            put = 'route="/v1/instances/{name}/ranks",method="PUT",status="200"'
            assert told[f"{PREFIX}requests_total{{{put}}}"] == 1
            refused = 'route="/v1/instances",method="GET",status="401"'
            assert told[f"{PREFIX}requests_total{{{refused}}}"] == 3
            assert told[f'{PREFIX}requests_total{{route="other",method="GET",status="401"}}'] == 1
            assert told[PREFIX + "connections"] >= 1
            assert told[f'sglang_mooncake_build_info{{version="{version()}"}}'] == 1
            again = scrape(server)
            assert (
                again[f'{PREFIX}requests_total{{route="/metrics",method="GET",status="200"}}'] == 1
            )


def test_metrics_name_no_instance_rank_or_host(make_record):
    with (
        BootstrapServer("127.0.0.1", 0) as server,
        BootstrapClient(f"{server.host}:{server.port}", WAIT_S, instance="a-name") as client,
    ):
        client.register(make_record(ALONE, FIRST), 30.0)
        rows = list(scrape(server))  # Not their figures: any of them may be the rank's port.
    assert rows
    rank = make_record(ALONE, FIRST).rank
    for named in ("a-name", rank.host, str(rank.port), server.host, str(server.port)):
        assert not [row for row in rows if named in row], named


@pytest.mark.slow
def test_who_scrapes_too_often_waits(monkeypatch):
    monkeypatch.setattr(allowance, "PER_S", 0.01)  # however long the requests take
    with BootstrapServer("127.0.0.1", 0, keys=KEYS.registry) as server:
        url = f"http://{server.host}:{server.port}/metrics"
        statuses = {requests.get(url, timeout=30).status_code for _ in range(150)}
    assert statuses == {200, 429}


@pytest.mark.parametrize("method", ["OPTIONS", "PATCH"])
def test_methods_of_strangers_make_no_rows_of_their_own(method):
    with BootstrapServer("127.0.0.1", 0) as server:
        requests.request(method, f"http://{server.host}:{server.port}/health", timeout=30)
        told = scrape(server)
    rows = [name for name in told if 'method="other"' in name]
    assert rows
    assert not [name for name in told if method in name]
