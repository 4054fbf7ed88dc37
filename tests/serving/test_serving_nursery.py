# SPDX-License-Identifier: Apache-2.0
"""Where a forked server is: in the network and on the cores of the thread that asked for it."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpu_serving.namespaces import enter_new_namespace
from cpu_serving.nursery import ForkedProcess, Nursery
from cpu_serving.servers import base_environment

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

HERE = Path("/proc/self/ns/net").stat().st_ino


def start(nursery: Nursery, log: Path) -> ForkedProcess:
    """A program that runs until it is ended."""
    return nursery.start("http.server", ["--bind", "127.0.0.1", "0"], base_environment(), log)


def network_of(process: ForkedProcess, log: Path) -> int:
    while process.poll() is None and b"Serving HTTP" not in log.read_bytes():
        os.sched_yield()
    return Path(f"/proc/{process.pid}/ns/net").stat().st_ino


def end(process: ForkedProcess) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(60.0)


def test_it_is_where_the_thread_is_that_asks(nursery: Nursery, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))

    def elsewhere() -> tuple[ForkedProcess, int]:
        os.close(enter_new_namespace("pytest"))
        os.sched_setaffinity(0, [core])
        return start(nursery, tmp_path / "far"), Path("/proc/thread-self/ns/net").stat().st_ino

    with ThreadPoolExecutor(1) as threads:  # a thread of its own, which goes with its namespace
        far, network = threads.submit(elsewhere).result()
        near = start(nursery, tmp_path / "near")
        try:
            assert network_of(far, tmp_path / "far") == network != HERE
            assert os.sched_getaffinity(far.pid) == {core}
            assert network_of(near, tmp_path / "near") == HERE
            assert os.sched_getaffinity(near.pid) == os.sched_getaffinity(0)
        finally:
            end(far)
            end(near)
