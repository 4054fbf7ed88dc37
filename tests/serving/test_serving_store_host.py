# SPDX-License-Identifier: Apache-2.0
"""Servers whose store one process for the host owns: they are killed and started again, and so is
that process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, wait_ready
from cpu_serving.store import flush
from cpu_serving.traffic import compare
from store_host import pids, store_directory
from store_servers import REQUESTS, Place, all_pages, ask, hit_all, hits, puts, stored_pages, until

KILLS = 5

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture
def place() -> Iterator[Place]:
    with store_directory() as path:
        yield Place(path)


def test_servers_and_the_owner_are_killed_and_hits_go_on(
    nursery: Nursery, place: Place, reference: Reference, tmp_path: Path
) -> None:
    expected = reference.answers("llama", REQUESTS)
    options = place.options(make_model("llama"))

    def started(fleet: Fleet, name: str) -> Server:
        server = fleet.server("single", options, name=name)
        wait_ready([server])
        return server

    with Fleet(tmp_path, nursery) as fleet:
        first = started(fleet, "first")
        answers = ask(first)
        assert hits(answers) == [0] * len(REQUESTS)
        assert not compare(expected, answers)
        until(lambda: puts(place) >= sum(map(stored_pages, REQUESTS)), "its pages are stored")
        (owner,) = pids(place.directory)
        first.process.kill()
        again = started(fleet, "again")
        assert pids(place.directory) == [owner], "nobody had to start anything"
        hit_all(again, expected)

        both = (again, started(fleet, "second"))

        def answered(server: Server) -> None:
            """No error, and no other token, whatever comes from the store."""
            flush(server)
            assert not compare(expected, ask(server))

        with ThreadPoolExecutor(2) as threads:
            for _ in range(KILLS):
                under_way = [threads.submit(answered, one) for one in both]
                os.kill(owner, signal.SIGKILL)
                for one in under_way:
                    one.result()
                old = [owner]
                until(lambda old=old: pids(place.directory) not in ([], old), "the next owner")
                (owner,) = pids(place.directory)
        for one in both:
            flush(one)
            hit_all(one, expected)
            assert hits(ask(one)) == all_pages()
