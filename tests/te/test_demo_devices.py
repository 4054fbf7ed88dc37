# SPDX-License-Identifier: Apache-2.0
"""``scripts/demo --transport rdma``: devices that are not there, or did not carry it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpu_serving import demo, devices
from cpu_serving.overlap import OverlapCounts
from cpu_serving.report import Report
from cpu_serving.stats import Handover
from te_sysfs import Sysfs

from te.topology import read_machine

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("names", [(), ("rxe0",)])
def test_asking_for_rdma_without_two_devices_is_an_error_that_says_so(
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = Sysfs(tmp_path)
    for name in names:
        tree.nic(name, None)
    monkeypatch.setattr(devices, "read_machine", lambda: read_machine(tmp_path))
    assert demo.main(["--transport", "rdma"]) == demo.EXIT_BROKEN
    said = capsys.readouterr().err
    assert f"needs two active RDMA devices, and here are: {', '.join(names) or 'none'};" in said
    assert "scripts/rdma-testbed" in said


def report(transport: str, carried_bytes: int | None, overlap: OverlapCounts | None) -> Report:
    handover = Handover(
        bytes=1000,
        gb_per_s=1.0,
        handover_p50_ms=1.0,
        handover_p99_ms=1.0,
        send_p99_us=1.0,
        poll_p99_us=1.0,
        transport=transport,
        rails=1,
        rooms={},
    )
    return Report(
        layout="x",
        requests=1,
        failed=0,
        equal_requests=1,
        tokens=1,
        leaked_pages=0,
        handover=handover,
        transport="rdma",
        carried_bytes=carried_bytes,
        overlap=overlap,
        single_s=1.0,
        disaggregated_s=1.0,
    )


@pytest.mark.parametrize(
    ("transport", "carried_bytes", "good"),
    [("rdma", 1000, True), ("rdma", 999, False), ("rdma", 0, False), ("tcp", 1000, False)],
)
def test_a_demo_over_rdma_fails_unless_its_devices_have_carried_it(
    transport: str, carried_bytes: int, good: bool
) -> None:
    got = report(transport, carried_bytes, None)
    assert got.good is good
    assert ("NOT THE PATH TAKEN" in got.table()) is (carried_bytes < got.handover.bytes)


@pytest.mark.parametrize(
    "counts", [(9, 0, 3, 1, 9), (9, 2, 0, 1, 9), (9, 2, 3, 1, 0), (9, 2, 3, 1, 9)]
)
def test_a_demo_of_overlap_fails_unless_sends_came_before_their_events(
    counts: tuple[int, int, int, int, int],
) -> None:
    got = report("rdma", None, OverlapCounts(*counts))
    assert got.good is all(counts)
    assert ("NOT THE WAY TAKEN" in got.table()) is not all(counts)
    assert json.loads(got.json_line())["overlap"]["early_prefixes"] == counts[2]
