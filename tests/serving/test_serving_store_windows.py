# SPDX-License-Identifier: Apache-2.0
"""Servers of a model with sliding windows that share their prefix caches through the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_hicache
from cpu_serving.traffic import compare, send_all
from store_host import store_directory
from store_servers import REQUESTS, Lender, Place, ask, hit_all, hits, knows, knows_all, until

from kvstore.memory.slab import UNIT_BYTES, Slab
from kvstore.objects.headers import HEADER, LIVE, MAGIC

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

NONE = [0] * len(REQUESTS)
MEMORY_BYTES = 32 << 20
#: Of 16 tokens with 2 heads of 32 numbers: keys and values of the two layers that have windows.
WINDOW_PAGE_BYTES = 2 * 2 * 16 * 2 * 32 * 4


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path, place: Place) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.fixture
def place() -> Iterator[Place]:
    with store_directory() as path:
        yield Place(path)


def started(fleet: Fleet, options: ServerOptions, name: str) -> Server:
    server = fleet.server("single", options, name=name)
    wait_ready([server])
    return server


def test_servers_take_each_others_windows(fleet: Fleet, place: Place, reference: Reference) -> None:
    """By the linker, and by HiCache, whose pools of windows have the same objects."""
    model = make_model("mellum")
    expected = reference.answers("mellum", REQUESTS)
    first = started(fleet, place.options(model), "first")
    answers = ask(first)
    assert hits(answers) == NONE
    assert not compare(expected, answers)
    flush(first)
    hit_all(first, expected)
    second = started(fleet, place.options(model, memory="0"), "second")
    hit_all(second, expected)
    other = with_hicache(ServerOptions(model), place.directory, memory="0", admission=False)
    hit_all(started(fleet, other, "hicache"), expected)


def damage_windows(slab: Path) -> int:
    """Inverts the bytes of all pages of windows that a lender holds; how many there are."""
    layout = Slab(MEMORY_BYTES, chunk_bytes=MEMORY_BYTES // 16)
    memory = np.memmap(slab, np.uint8, "r+")[UNIT_BYTES:]
    headers = memory[: layout.units * HEADER.itemsize].view(HEADER)
    live = (headers["magic"] == MAGIC) & (headers["state"] == LIVE)
    slots = np.flatnonzero(live & (headers["nbytes"] == WINDOW_PAGE_BYTES)).tolist()
    for slot in slots:
        begin = layout.slot_offset(slot)
        memory[begin : begin + WINDOW_PAGE_BYTES] ^= 0xFF
    return len(slots)


def test_windows_that_are_damaged_are_computed(
    fleet: Fleet, place: Place, reference: Reference
) -> None:
    """SGLang ends their requests, which are asked again. Without the comparison of checksums they
    give other tokens: the windows that were loaded are those that the model uses."""
    model = make_model("mellum")
    expected = reference.answers("mellum", REQUESTS)
    slab = place.path / "slab"
    with Lender(place, f"--directory={place.directory}", f"--file={slab}") as lender:
        server = started(fleet, place.options(model, memory="0"), "careful")
        until(lambda: knows(place, [lender]), "the lender is known")
        assert not compare(expected, ask(server))
        flush(server)
        hit_all(server, expected)
        flush(server)
        assert damage_windows(slab) > 0
        assert not compare(expected, send_all(server.url, REQUESTS, concurrency=4))
        assert "it is asked again" in server.process.log_text()
        assert "pages of the pool swa did not come: corrupted" in server.process.log_text()
        # They were removed, and are stored again.
        assert not compare(expected, ask(server))
        flush(server)
        hit_all(server, expected)
        server.stop()
        assert damage_windows(slab) > 0
        trusting = started(fleet, place.options(model, memory="0", verify=False), "trusting")
        until(lambda: knows(place, [lender]) and knows_all(place), "its pages are known")
        wrong = ask(trusting)
        assert max(hits(wrong)) > 0
        assert compare(expected, wrong)
