# SPDX-License-Identifier: Apache-2.0
"""SGLang's HiCache backend of Mooncake's store, unmodified, on kvstore. Each run has one
number of TP ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush
from cpu_serving.traffic import Answer, compare, make_requests, send_all
from store_host import store_directory

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

PAGE = 16
REQUESTS = make_requests(4, 400, seed=37)
WAIT_S = 120.0
FLAGS = (
    "--enable-hierarchical-cache",
    *("--hicache-storage-backend", "mooncake"),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
    *("--hicache-mem-layout", "page_first_direct"),
    *("--hicache-io-backend", "direct"),
    *("--hicache-storage-backend-extra-config", json.dumps({"prefetch_threshold": 16})),
)


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path, directory: Path) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.fixture
def directory() -> Iterator[Path]:
    with store_directory() as path:
        yield path


def server(
    fleet: Fleet, directory: Path, tp: int, name: str, segment_bytes: int, master: str
) -> Server:
    environment = {
        "SGLANG_MOONCAKE_DROP_IN": "1",
        "SGLANG_MOONCAKE_STORE": json.dumps({"directory": str(directory)}),
        "MOONCAKE_MASTER": master,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment_bytes),
    }
    options = ServerOptions(
        make_model("llama"), tp=tp, page_size=PAGE, extra_args=FLAGS, extra_env=environment
    )
    made = fleet.server("single", options, name=name)
    wait_ready([made])
    return made


def hits(server: Server, expected: list[Answer]) -> list[int]:
    answers = send_all(server.url, REQUESTS, concurrency=4)
    assert not [one.error for one in answers if one.error]
    assert not compare(expected, answers)
    return [one.cached_tokens for one in answers]


@pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=pytest.mark.one_of("store-tp", str(tp))) for tp in (1, 2)]
)
def test_a_second_server_hits_what_the_first_one_has_computed(
    fleet: Fleet, directory: Path, reference: Reference, tp: int
) -> None:
    expected = reference.answers("llama", REQUESTS)
    first = server(fleet, directory, tp, "first", 128 << 20, "any:1")
    assert hits(first, expected) == [0] * len(REQUESTS)
    second = server(fleet, directory, tp, "second", 0, "any:1")
    all_pages = [(len(one.input_ids) - 1) // PAGE * PAGE for one in REQUESTS]
    deadline_s = time.monotonic() + WAIT_S
    while (found := hits(second, expected)) != all_pages:
        assert time.monotonic() < deadline_s, f"hits of {found} tokens, not {all_pages}"
        flush(second)
    for one in (first, second):
        log = one.process.log_text()
        assert "mooncake.store is kvstore" in log
        assert log.count("who names 'any:1 default' shares its objects") == tp
    if tp == 1:  # Who names another master shares nothing.
        other = server(fleet, directory, tp, "other", 0, "another:1")
        assert hits(other, expected) == [0] * len(REQUESTS)
