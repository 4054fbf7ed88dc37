# SPDX-License-Identifier: Apache-2.0
"""What makes ``scripts/demo`` fail: devices that are not there, or a way that was not taken."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from cpu_serving import cuda, demo, devices
from cpu_serving.cuda import CudaCounts, read_cuda_counts
from cpu_serving.overlap import OverlapCounts
from cpu_serving.processes import ServingError
from cpu_serving.report import Drafts, Report
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


def report(
    transport: str,
    carried_bytes: int | None,
    overlap: OverlapCounts | None,
    on_gpu: tuple[CudaCounts, ...] = (),
    drafts: Drafts | None = None,
    bytes_early: int | None = None,
    verify: str = "off",
    equal: int = 0,
    different: int = 0,
) -> Report:
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
        bytes_early=bytes_early or 0,
        fallbacks={"short prompts": 3, "retries": 5},
        hooks_p50_us=None,
        digests={"equal": equal, "different": different, "cells": 5, "bytes": 0},
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
        verify=verify,
        overlap=overlap,
        layerwise=bytes_early is not None,
        cuda=on_gpu,
        drafts=drafts,
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


@pytest.mark.parametrize(
    ("counts", "good"),
    [((5, 0, 0), True), ((0, 0, 0), False), ((5, 1, 0), False), ((5, 0, 1), False)],
)
def test_a_demo_of_cuda_fails_unless_both_servers_staged_and_waited_for_nothing(
    counts: tuple[int, int, int], good: bool
) -> None:
    got = report("rdma", None, None, (CudaCounts(7, 0, 0), CudaCounts(*counts)))
    assert got.good is good
    assert f"7 + {counts[0]}" in got.table()
    assert json.loads(got.json_line())["cuda"][1]["synchronising_calls"] == counts[2]


@pytest.mark.parametrize(("batches", "good"), [(0, True), (1, False)])
def test_a_demo_of_cuda_over_rdma_fails_if_anything_was_staged(batches: int, good: bool) -> None:
    assert report("rdma", 1000, None, (CudaCounts(batches, 0, 0),)).good is good


@pytest.mark.parametrize("bytes_early", [0, 670])
def test_a_demo_of_layers_fails_unless_bytes_left_before_send(bytes_early: int) -> None:
    got = report("rdma", None, None, bytes_early=bytes_early)
    assert got.good is bool(bytes_early)
    table = got.table()
    assert ("NOT THE WAY TAKEN" in table) is (bytes_early == 0)
    assert "670 (67%)" in table or not bytes_early
    assert table.index("5 times: retries") < table.index("3 times: short prompts")
    assert json.loads(got.json_line())["bytes_early"] == bytes_early


@pytest.mark.parametrize(
    ("verify", "equal", "different", "good"),
    [
        ("all", 1, 0, True),
        ("all", 0, 0, False),
        ("all", 1, 1, False),
        ("sample", 0, 0, True),
        ("sample", 0, 1, False),
    ],
)
def test_a_demo_of_digests_fails_unless_all_are_made_and_equal(
    verify: str, equal: int, different: int, good: bool
) -> None:
    got = report("rdma", None, None, verify=verify, equal=equal, different=different)
    assert got.good is good
    assert f"{equal} equal, {different} not" in got.table()
    assert json.loads(got.json_line())["digests"]["equal"] == equal


def test_without_layers_nothing_is_said_of_them() -> None:
    assert "before send()" not in report("rdma", None, None).table()


def test_counts_are_of_all_ranks_and_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        counted = {"batches": 1 + rank, "pageable_copies": 0, "synchronising_calls": 10 * rank}
        (tmp_path / f"{rank}.cuda").write_text(json.dumps(counted))
    assert read_cuda_counts(tmp_path, 2, 0.0) == CudaCounts(3, 0, 10)
    monkeypatch.setattr(cuda, "FRESH_TIMEOUT_S", 0.0)
    with pytest.raises(ServingError, match="0 of 2 ranks count CUDA calls"):
        read_cuda_counts(tmp_path, 2, time.time() + 1000)
    with pytest.raises(ServingError, match="2 of 3 ranks"):
        read_cuda_counts(tmp_path, 3, 0.0)


def test_a_demo_of_drafts_fails_unless_some_were_right() -> None:
    assert report("rdma", 1000, None, drafts=Drafts(verified=5, right=1)).good
    assert not report("rdma", 1000, None, drafts=Drafts(verified=5, right=0)).good
