# SPDX-License-Identifier: Apache-2.0
"""Servers with HiCache whose pages go on into the store."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_hicache, with_store
from cpu_serving.traffic import Answer, Request, compare, make_requests, send_all
from store_host import store_directory

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

PAGE = 16
REQUESTS = make_requests(4, 400, seed=23)
NONE = [0] * len(REQUESTS)
WAIT_S = 120.0


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path, directory: Path) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


def ask(server: Server, requests: Sequence[Request] = REQUESTS) -> list[Answer]:
    answers = send_all(server.url, requests, concurrency=4)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def hits(answers: Sequence[Answer]) -> list[int]:
    return [one.cached_tokens for one in answers]


def all_pages(requests: Sequence[Request] = REQUESTS) -> list[int]:
    return [(len(one.input_ids) - 1) // PAGE * PAGE for one in requests]


def started(fleet: Fleet, options: ServerOptions, name: str) -> Server:
    server = fleet.server("single", options, name=name)
    wait_ready([server])
    return server


def hit_all(server: Server, expected: Sequence[Answer]) -> None:
    """Pages go into the store in the background: asks again until all are there."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        answers = ask(server)
        assert not compare(expected, answers)
        if hits(answers) == all_pages():
            return
        assert time.monotonic() < deadline_s, f"hits of {hits(answers)} tokens, not {all_pages()}"
        flush(server)


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_a_second_server_hits_what_the_first_one_has_computed(
    fleet: Fleet, directory: Path, reference: Reference, model: str
) -> None:
    expected = reference.answers(model, REQUESTS)
    options = ServerOptions(make_model(model))
    first = started(fleet, with_hicache(options, directory, admission=False), "first")
    answers = ask(first)
    assert hits(answers) == NONE
    assert not compare(expected, answers)
    second = started(fleet, with_hicache(options, directory, memory="0", admission=False), "second")
    hit_all(second, expected)
    linking = started(fleet, with_store(options, directory, memory="0", admission=False), "linking")
    hit_all(linking, expected)
    request = urllib.request.Request(f"{second.url}/hicache/storage-backend/clear", method="POST")
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        assert answer.status == 200
    flush(second)
    assert hits(ask(second)) == NONE
    assert hits(ask(first)) == all_pages(), "its own pools have them"


def test_a_model_with_windows_has_two_pools(
    fleet: Fleet, directory: Path, reference: Reference
) -> None:
    expected = reference.answers("mellum", REQUESTS)
    options = ServerOptions(make_model("mellum"))
    first = started(fleet, with_hicache(options, directory, admission=False), "first")
    assert not compare(expected, ask(first))
    for pool in ("kv", "swa"):
        assert f"this rank's pages of the pool {pool}:" in first.process.log_text()
    second = started(fleet, with_hicache(options, directory, memory="0", admission=False), "second")
    hit_all(second, expected)
    first.process.kill()
    flush(second)
    answers = ask(second)
    assert not compare(expected, answers)
    assert hits(answers) == all_pages(), "the memory is the host's, not that of the first server"
