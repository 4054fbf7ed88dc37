# SPDX-License-Identifier: Apache-2.0
"""Servers that share their prefix caches through the store: what they take from it, and what they
must not take."""

from __future__ import annotations

import json
import shutil
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush
from cpu_serving.traffic import compare, make_requests, send_all
from patient import patient
from prometheus_client.parser import text_string_to_metric_families
from store_host import kill, pids, store_directory
from store_redis import redis_server
from store_servers import (
    PAGE,
    REQUESTS,
    WAIT_S,
    Lender,
    Place,
    all_pages,
    ask,
    held,
    hit_all,
    hits,
    knows,
    knows_all,
    puts,
    stored_pages,
    until,
)

from bootstrap_server.admission.secret_file import write_secret_file
from kvstore.client.status import with_owner
from kvstore.metrics.table import PREFIX, Key, counters
from kvstore.objects.weights import identity
from sglang_mooncake.metrics import RANK_LABELS

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PROMPT = 400


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery,
    tmp_path_factory: pytest.TempPathFactory,
    place: Place,
) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path_factory.mktemp("store"), nursery) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with store_directory() as path:
        yield Place(path)


NONE = [0] * len(REQUESTS)
#: A prefill server keeps no token that it makes.
PAGES_OF_PREFILL = sum(len(one.input_ids) // PAGE for one in REQUESTS)


@pytest.fixture(scope="module")
def first(fleet: Fleet, place: Place, reference: Reference) -> Server:
    """A server that has computed all requests, and has their pages in the store."""
    server = fleet.server("single", place.options(make_model("llama")), name="first")
    wait_ready([server])
    answers = ask(server)
    assert hits(answers) == NONE
    assert not compare(reference.answers("llama", REQUESTS), answers)
    # In the background; what waits for that is dropped as the device's cache is emptied.
    until(lambda: held(place) >= sum(map(stored_pages, REQUESTS)), "the pages are stored")
    return server


# -- what is taken


def test_a_server_hits_what_it_has_computed_before_its_cache_was_emptied(
    first: Server, reference: Reference
) -> None:
    flush(first)
    answers = ask(first)
    assert hits(answers) == all_pages()
    assert not compare(reference.answers("llama", REQUESTS), answers)


def test_a_second_server_hits_what_the_first_one_has_computed(
    first: Server, fleet: Fleet, place: Place, reference: Reference
) -> None:
    before = {one.pid for one in place.statuses()}
    second = fleet.server("single", place.options(make_model("llama")), name="second")
    wait_ready([second])
    until(lambda: knows_all(place, before), "the pages of the first server are known")
    answers = ask(second)
    assert hits(answers) == all_pages()
    assert not compare(reference.answers("llama", REQUESTS), answers)
    second.stop()


@pytest.mark.by_turns("mla")
def test_mla_pages(fleet: Fleet, place: Place, reference: Reference) -> None:
    server = fleet.server("single", place.options(make_model("deepseek")), name="mla")
    wait_ready([server])
    assert hits(ask(server)) == NONE
    flush(server)
    hit_all(server, reference.answers("deepseek", REQUESTS))
    server.stop()


# -- what is not taken


def other_weights(folder: Path) -> Path:
    """A model that differs from `llama` in its weights alone, under the same name."""
    path = folder / make_model("llama").name
    shutil.copytree(make_model("llama", seed=1), path)
    return path


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.by_turns(name))
        for name in ("tp 2", "bfloat16", "other weights")
    ],
)
def test_pages_that_mean_something_else_are_left_alone(
    variant: str, first: Server, fleet: Fleet, place: Place, tmp_path: Path
) -> None:
    options = place.options(make_model("llama"))
    if variant == "tp 2":
        options = replace(options, tp=2)
    elif variant == "bfloat16":
        options = replace(options, extra_args=(*options.extra_args, "--dtype", "bfloat16"))
    else:
        options = place.options(other_weights(tmp_path))
    before = {one.pid for one in place.statuses()}
    server = fleet.server("single", options, name=variant.replace(" ", "-"))
    wait_ready([server])
    until(lambda: knows_all(place, before), "the pages of the first server are known")
    computed = ask(server)
    assert hits(computed) == NONE
    refused = [one for one in place.statuses() if one.pid not in before]
    assert len(refused) == options.ranks
    for one in refused:
        assert one.lookups["rejected"] > 0, "and it is counted"
    flush(server)
    hit_all(server, computed)  # Its own pages are there beside the others.
    server.stop()


def test_without_signatures_wrong_tokens_come(
    first: Server, fleet: Fleet, place: Place, tmp_path: Path, reference: Reference
) -> None:
    """What the tests above stand on: an operator who says that other weights are the same gets
    pages that they did not compute."""
    model = other_weights(tmp_path)
    plain = fleet.server("single", ServerOptions(model, page_size=PAGE), name="plain")
    wait_ready([plain])
    right = ask(plain)
    plain.stop()
    options = place.options(model, weights=identity(make_model("llama")))
    before = {one.pid for one in place.statuses()}
    server = fleet.server("single", options, name="deceived")
    wait_ready([server])
    until(lambda: knows_all(place, before), "the pages of the first server are known")
    wrong = ask(server)
    assert max(hits(wrong)) > 0
    assert compare(right, wrong), "its tokens differ from those that it computes itself"
    server.stop()


@pytest.mark.parametrize(
    "named", [{"weight_version": "2"}, {}], ids=["with a version", "without one"]
)
def test_an_update_of_the_weights_makes_old_pages_unknown(
    fleet: Fleet, place: Place, tmp_path: Path, named: dict[str, str]
) -> None:
    model = other_weights(tmp_path)
    name = f"updated-{len(named)}"  # of one fleet, no two servers have the same
    server = fleet.server("single", place.options(make_model("llama")), name=name)
    wait_ready([server])
    old = ask(server)
    body = json.dumps({"model_path": str(model)} | named).encode()
    request = urllib.request.Request(
        f"{server.url}/update_weights_from_disk",
        body,
        {"Content-Type": "application/json"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert json.load(answer)["success"]
    new = ask(server)
    assert hits(new) == NONE
    assert compare(old, new), "other weights give other tokens"
    flush(server)
    hit_all(server, new)
    server.stop()


# -- what breaks


@pytest.mark.by_turns("owners killed")
def test_owners_of_other_hosts_are_killed_under_load(fleet: Fleet, reference: Reference) -> None:
    """Each page is at two of three hosts, and the server's own lends no memory. One owner is killed
    while the server reads from them; then another, once each page is at two again. Before that the
    index is killed, and comes back empty."""
    requests = make_requests(24, PROMPT, seed=23)
    pages = sum(map(stored_pages, requests))
    expected = reference.answers("llama", requests)
    with store_directory() as path, redis_server() as redis:
        place, secret = Place(path), path / "secret"
        write_secret_file(str(secret))
        # As a user's: what is at an owner that is gone is stored again soon.
        told: dict[str, Any] = {"request_timeout_s": 2.0, "load_timeout_s": 10.0}
        told |= {"index": redis.url, "secret_file": str(secret), "copies": 2}
        where = [f"--index={redis.url}", f"--secret-file={secret}"]
        lenders = [Lender(place, *where, f"--directory={path / str(host)}") for host in range(3)]
        options = place.options(make_model("llama"), memory="0", **told)
        server = fleet.server("single", options, name="borrower")
        try:
            wait_ready([server])
            until(lambda: knows(place, lenders), "the owners are known")
            assert not compare(expected, ask(server, requests))
            for kill in (redis.kill, lenders[0].kill, lenders[1].kill):
                until(lambda: held(place) == 2 * pages, "each page is at two owners")
                forget_what_came(place)
                flush(server)
                killer = threading.Timer(0.15, kill)
                killer.start()
                answers = ask(server, requests)
                killer.join()
                assert not compare(expected, answers)
                if kill == redis.kill:
                    assert hits(answers) == all_pages(requests)
                    redis.start()
                flush(server)
                assert not compare(expected, ask(server, requests)), "stores what has one copy"
            lenders[2].kill()
            flush(server)
            forget_what_came(place)
            answers = ask(server, requests)
            assert hits(answers) == [0] * len(requests)
            assert not compare(expected, answers)
        finally:
            for lender in lenders:
                lender.kill()
        server.stop()


def forget_what_came(place: Place) -> None:
    """The server's host gets another owner, which knows what those of other hosts have: what has
    come by way of the last one is not there."""
    (former,) = pids(place.directory)
    kill(former)

    def is_used() -> bool:
        names = [f"process {pid}" for pid in pids(place.directory) if pid != former]
        seen = [owner for one in place.statuses() for owner in one.owners]
        return any(one.usable and one.name in names for one in seen)

    def knows_others() -> bool:
        others = {one.pid for one in place.statuses()} - set(pids(place.directory))
        return knows_all(place, but=others)

    until(is_used, "the server has another owner")
    until(knows_others, "which knows the pages of other hosts")


# -- beside prefill and decode on different servers


def metrics(server: Server) -> dict[Key, float]:
    """The store's, as the server's only rank tells them; "role" and the other labels of the rank
    are looked at and left out."""
    found: dict[Key, float] = {}
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                labels = dict(sample.labels)
                assert labels.pop("role") == "prefill"
                assert [labels.pop(name) for name in RANK_LABELS if name in labels][1:] == ["0"] * 4
                key = sample.name.removeprefix(PREFIX), tuple(labels.values())
                found[key] = sample.value
    return found


def test_a_prefill_server_hits_the_store_and_hands_over(fleet: Fleet, reference: Reference) -> None:
    with store_directory() as path:
        place = Place(path)
        model = make_model("llama")
        options = place.options(model)
        options = replace(options, extra_args=(*options.extra_args, "--enable-metrics"))
        pair = fleet.pair(patient(options), patient(ServerOptions(model, page_size=PAGE)))
        pair.wait_ready()
        for _ in range(2):
            answers = send_all(pair.router.url, REQUESTS, concurrency=4)
            assert not [one.error for one in answers if one.error]
            assert not compare(reference.answers("llama", REQUESTS), answers)
            until(lambda: puts(place) >= PAGES_OF_PREFILL, "the pages are stored")
            flush(pair.prefill)
        mine, host = sorted(place.statuses(), key=lambda one: one.own is not None)
        assert mine.gets["right"] == sum(all_pages()) // PAGE
        told = counters(with_owner(mine, host, host.own))
        assert told["published_total", ()] == PAGES_OF_PREFILL
        until(lambda: told.items() <= metrics(pair.prefill).items(), "SGLang's /metrics has it")
        for server in (pair.prefill, pair.decode):
            assert leaked_pages(server) == 0
            server.stop()
