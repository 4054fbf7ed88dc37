# SPDX-License-Identifier: Apache-2.0
"""Processes beside the servers of scripts/chaos: where they are, what they say, when they end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from chaos_run.beside import Beside, kept_busy
from cpu_serving.processes import ServingError

WAIT_S = 60.0


async def said(module: str, *argv: str, timeout_s: float = WAIT_S) -> bytes:
    async with Beside(module, argv, [max(os.sched_getaffinity(0))]) as process:
        return await process.said(timeout_s)


def test_what_it_says() -> None:
    assert asyncio.run(said("platform", "terse")).strip()


def test_a_failure_has_its_words() -> None:
    with pytest.raises(ServingError, match=r"no_such_module ended with 1: .*No module named"):
        asyncio.run(said("no_such_module"))


def test_one_that_does_not_end_is_named() -> None:
    with pytest.raises(ServingError, match=r"http.server has not ended after 0 s"):
        asyncio.run(said("http.server", "--bind", "127.0.0.1", "0", timeout_s=0.2))


def test_cores_are_kept_busy_by_who_gives_way() -> None:
    async def look() -> list[int]:
        cores, others = sorted(os.sched_getaffinity(0)), set(_children())
        async with kept_busy(cores):
            found = {int(pid) for pid in set(_children()) - others}
            while any(os.sched_getscheduler(pid) != os.SCHED_IDLE for pid in found):
                await asyncio.sleep(0.05)
            assert {frozenset(os.sched_getaffinity(pid)) for pid in found} == {
                frozenset([core]) for core in cores
            }
        return [pid for pid in found if str(pid) in _children()]

    assert asyncio.run(look()) == []


def _children() -> list[str]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return path.read_text().split()
