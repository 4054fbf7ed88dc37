# SPDX-License-Identifier: Apache-2.0
"""Servers that share their prefix caches through the store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_store
from cpu_serving.traffic import Answer, Request, compare, make_requests, send_all

pytestmark = pytest.mark.serving

PAGE = 16
PROMPT = 400


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        yield Path(path)


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


def cached(requests: Sequence[Request]) -> list[int]:
    """All pages that a server can take from a cache: it computes the last token in any case."""
    return [(len(one.input_ids) - 1) // PAGE * PAGE for one in requests]


def ask(server: Server, requests: Sequence[Request]) -> list[Answer]:
    answers = send_all(server.url, requests, concurrency=4)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def assert_right(
    server: Server, reference: Reference, model: str, requests: Sequence[Request]
) -> list[int]:
    """Tokens equal to those of a server without a store; how many tokens each had cached."""
    answers = ask(server, requests)
    assert not compare(reference.answers(model, requests), answers)
    return [one.cached_tokens for one in answers]


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_a_second_server_hits_what_the_first_one_has_computed(
    model: str, fleet: Fleet, directory: Path, reference: Reference
) -> None:
    options = with_store(ServerOptions(make_model(model)), directory)
    requests = make_requests(4, PROMPT, seed=17)
    first = fleet.server("single", options, name="first")
    wait_ready([first])
    assert assert_right(first, reference, model, requests) == [0] * 4
    flush(first)
    assert assert_right(first, reference, model, requests) == cached(requests)
    second = fleet.server("single", options, name="second")
    wait_ready([second])
    assert assert_right(second, reference, model, requests) == cached(requests)
