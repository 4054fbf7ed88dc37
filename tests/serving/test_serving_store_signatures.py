# SPDX-License-Identifier: Apache-2.0
"""Pages of equal size that mean something else: signatures keep servers from taking them, and
without signatures they take them and answer with other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_linker
from cpu_serving.traffic import Answer, compare
from store_host import store_directory
from store_servers import (
    REQUESTS,
    Lender,
    Place,
    all_pages,
    ask,
    held,
    hits,
    knows_all,
    puts,
    stored_pages,
    until,
)

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

NONE = [0] * len(REQUESTS)
PAGES = sum(map(stored_pages, REQUESTS))


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path, place: Place) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.fixture
def place() -> Iterator[Place]:
    with store_directory() as path:
        yield Place(path)


def of_dtype(options: ServerOptions, dtype: str) -> ServerOptions:
    return replace(options, extra_args=(*options.extra_args, "--dtype", dtype))


def unsigned(options: ServerOptions) -> ServerOptions:
    """Of a server whose linker has its signatures off."""
    return with_linker(options, "cpu_serving.unsigned_linker", "UnsignedLinker")


def started(fleet: Fleet, options: ServerOptions, name: str) -> Server:
    server = fleet.server("single", options, name=name)
    wait_ready([server])
    return server


def after_another(
    fleet: Fleet, place: Place, first: ServerOptions, second: ServerOptions
) -> list[Answer]:
    """What the second server answers that shares a store with the first."""
    other = started(fleet, first, "first")
    assert hits(ask(other)) == NONE
    until(lambda: held(place) >= PAGES, "the pages are stored")
    before = {one.pid for one in place.statuses()}
    server = started(fleet, second, "second")
    until(lambda: knows_all(place, before), "the pages of the first server are known")
    answers = ask(server)
    other.stop()
    return answers


def test_pages_of_two_dtypes_have_one_size(
    fleet: Fleet, place: Place, tmp_path: Path, nursery: Nursery
) -> None:
    def of(dtype: str) -> ServerOptions:
        return of_dtype(place.options(make_model("llama")), dtype)

    right = after_another(fleet, place, of("bfloat16"), of("float16"))
    assert hits(right) == NONE
    (status,) = [one for one in place.statuses() if one.lookups.get("rejected")]
    assert status.lookups["rejected"] >= sum(all_pages()) // 16 - len(REQUESTS)
    with (
        store_directory() as path,
        Fleet(tmp_path / "unsigned", nursery) as others,
    ):
        place = Place(path)
        wrong = after_another(others, place, unsigned(of("bfloat16")), unsigned(of("float16")))
    assert max(hits(wrong)) > 0
    assert compare(right, wrong)


def test_pages_of_two_ranks_have_one_size(
    fleet: Fleet, place: Place, tmp_path: Path, nursery: Nursery
) -> None:
    """Of one server, each of whose ranks has one of two heads; both store at one owner."""

    model = make_model("llama")
    with Lender(place):
        options = replace(place.options(model, memory="0"), tp=2)
        right, signed = asked_twice(fleet, place, options)
    assert hits(signed) == all_pages()
    assert not compare(right, signed)
    with (
        store_directory() as path,
        Fleet(tmp_path / "unsigned", nursery) as others,
        Lender(Place(path)),
    ):
        place = Place(path)
        options = unsigned(replace(place.options(model, memory="0"), tp=2))
        _, wrong = asked_twice(others, place, options)
    assert max(hits(wrong)) > 0
    assert compare(right, wrong)


def asked_twice(
    fleet: Fleet, place: Place, options: ServerOptions
) -> tuple[list[Answer], list[Answer]]:
    """What a server computes, and what it answers with its pages out of the store."""
    server = started(fleet, options, "tp-2")
    until(lambda: borrowers(place) == options.ranks, "the ranks know the lender")
    first = ask(server)
    assert hits(first) == NONE
    # What waits to be stored is dropped as the device's cache is emptied.
    until(lambda: puts(place) >= options.ranks * PAGES, "the pages are stored")
    flush(server)
    second = ask(server)
    server.stop()
    return first, second


def borrowers(place: Place) -> int:
    """Processes without memory of their own that can use another's."""
    return sum(
        one.own is None and any(seen.usable for seen in one.owners) for one in place.statuses()
    )
