# SPDX-License-Identifier: Apache-2.0
"""``scripts/demo --transport rdma``: devices that are not there, or did not carry it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cpu_serving import demo, devices
from cpu_serving.report import Report
from cpu_serving.stats import Handover
from te_sysfs import Sysfs

from te.topology import read_machine


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


@pytest.mark.parametrize(
    ("transport", "carried_bytes", "good"),
    [("rdma", 1000, True), ("rdma", 999, False), ("rdma", 0, False), ("tcp", 1000, False)],
)
def test_a_demo_over_rdma_fails_unless_its_devices_have_carried_it(
    transport: str, carried_bytes: int, good: bool
) -> None:
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
    report = Report(
        layout="x",
        requests=1,
        failed=0,
        equal_requests=1,
        tokens=1,
        leaked_pages=0,
        handover=handover,
        transport="rdma",
        carried_bytes=carried_bytes,
        single_s=1.0,
        disaggregated_s=1.0,
    )
    assert report.good is good
    assert ("NOT THE PATH TAKEN" in report.table()) is (carried_bytes < handover.bytes)
