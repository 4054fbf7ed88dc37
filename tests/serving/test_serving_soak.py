# SPDX-License-Identifier: Apache-2.0
"""scripts/soak for some seconds each: servers whose store changes, freezes or cannot be reached,
and pairs whose prefill servers die, or that strangers attack."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cpu_serving.namespaces import NoNetwork
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet
from soak_run.bench import Bench
from soak_run.kills import ROOMS
from soak_run.options import SCENARIOS
from soak_run.results import Row
from soak_run.scenarios import RUNNERS

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

CLIENTS, DEADLINE_S = 4, 200.0
LATE_MAX_S = 3.0
"""Beside other tests a thread may not run for seconds. What connects within a deadline took more
for all owners."""


@pytest.fixture(scope="module")
def bench(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with (
        tempfile.TemporaryDirectory(prefix="kv") as path,
        Fleet(tmp_path_factory.mktemp("soak"), nursery) as fleet,
    ):
        yield Bench(fleet, Path(path), CLIENTS, DEADLINE_S, seed=3)


@pytest.fixture(scope="module")
def run(bench: Bench) -> Callable[[str, float], Row]:
    def shown(name: str, seconds: float) -> Row:
        try:
            row = RUNNERS[name](bench, seconds)
        except NoNetwork as error:
            pytest.skip(str(error))
        assert row.bad(LATE_MAX_S) == []
        return row

    return shown


def test_each_scenario_has_a_runner() -> None:
    assert list(RUNNERS) == list(SCENARIOS)


def test_an_adapter_that_is_trained_again_in_place(run: Callable[[str, float], Row]) -> None:
    row = run("lora", 9.0)
    assert row.figures.pages > 0


def test_weights_that_are_updated_in_place(run: Callable[[str, float], Row]) -> None:
    assert run("update", 8.0).figures.pages > 0


def test_a_rank_that_is_slow(run: Callable[[str, float], Row]) -> None:
    row = run("slow-rank", 10.0)
    assert row.figures.dropped > 0, "one rank drops what the other one stores"
    assert row.figures.pages > 0


def test_owners_of_the_host_that_stand_still(run: Callable[[str, float], Row]) -> None:
    row = run("frozen", 8.0)
    assert row.probed.puts > 0
    assert row.figures.failed_loads == 0


def test_owners_that_stand_still_and_are_read_over_tcp(run: Callable[[str, float], Row]) -> None:
    row = run("frozen-tcp", 8.0)
    assert row.probed.gets > 0
    assert row.figures.pages > 0


def test_an_owner_that_two_servers_share_is_killed(run: Callable[[str, float], Row]) -> None:
    row = run("owner-dies", 6.0)
    assert row.probed.gets > 0
    assert row.figures.pages > 0


def test_an_owner_behind_a_firewall(run: Callable[[str, float], Row]) -> None:
    row = run("firewall", 12.0)
    assert row.figures.pages > 0
    assert row.figures.failed_loads == 0


def test_prefill_servers_that_are_killed_while_rooms_wait(run: Callable[[str, float], Row]) -> None:
    row = run("kills", 1.0)
    assert row.counts["cut off"] == 2 * ROOMS, "of one kill all had memory, of the other one few"


@pytest.mark.parametrize("name", ["strangers", "strangers-secret"])
def test_strangers_at_all_ports_of_a_pair(run: Callable[[str, float], Row], name: str) -> None:
    assert run(name, 12.0).counts["equal"] > 0
