# SPDX-License-Identifier: Apache-2.0
"""Servers whose store one process for the host owns: they are killed and started again, and so is
that process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, wait_ready
from cpu_serving.store import flush
from cpu_serving.traffic import compare
from store_host import end_all, pids
from store_servers import REQUESTS, Place, all_pages, ask, hit_all, hits, puts, stored_pages, until

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        place = Place(Path(path))
        yield place
        end_all(place.directory)


def test_a_server_that_was_killed_hits_what_it_had_stored_and_so_it_does_when_the_owner_was(
    nursery: Nursery, place: Place, reference: Reference, tmp_path: Path
) -> None:
    expected = reference.answers("llama", REQUESTS)
    options = place.options(make_model("llama"), owner="host")

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

        os.kill(owner, signal.SIGKILL)
        answers = ask(again)  # No error, whatever they hit.
        assert not compare(expected, answers)
        until(lambda: pids(place.directory) not in ([], [owner]), "the next owner")
        flush(again)
        hit_all(again, expected)
        assert hits(ask(again)) == all_pages()
