# SPDX-License-Identifier: Apache-2.0
"""Real servers of vLLM on the CPU take pages from the store, and never wrong ones.

The test's own process lends the memory, so that it can spoil what lies there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.store_status import outcomes, statuses
from cpu_serving.traffic import Answer, Request, compare, make_requests
from cpu_serving.vllm_servers import BLOCK, VllmServer, ask, reset, start_vllm, store_flags
from store_host import owner_here, pids, store_directory

import te
from kvstore.config import Config
from kvstore.store import Store

# Starting a server takes 20 CPU-seconds.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WAIT_S = 60.0
REQUESTS = make_requests(4, 600, seed=31)
PAGES = sum(len(one.input_ids) // BLOCK for one in REQUESTS)
#: vLLM computes the last token of a prompt in any case.
CACHED = [len(one.input_ids) // BLOCK * BLOCK for one in REQUESTS]
OTHERS = {"weights": "the same model, by another name"}
#: The server has fewer blocks than these requests need together in the end.
BLOCKS = 64
LONG = make_requests(8, 300, seed=32, new_tokens=200)


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """Where the store's processes find each other, and `XDG_RUNTIME_DIR` of the servers."""
    with store_directory() as path:
        yield path


@pytest.fixture(scope="module")
def hosting(place: Path) -> Iterator[ExitStack]:
    """Ends the owner of the host when it is closed."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def owner(hosting: ExitStack, place: Path) -> Store:
    """Of the host: the test itself lends the memory, which servers read."""
    engine = te.Config(status_dir=None)
    config = Config(directory=place / "kvstore", memory=64 << 20, engine=engine)
    return hosting.enter_context(owner_here(config))


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory,
    nursery: Nursery,
    hosting: ExitStack,
) -> Iterator[Fleet]:
    """Ends before the store's owner: its servers would start another one."""
    with Fleet(tmp_path_factory.mktemp("vllm"), nursery) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def servers(
    fleet: Fleet, owner: Store, place: Path
) -> tuple[VllmServer, list[Answer], list[Answer]]:
    """A server on the store, and what an ordinary one has answered: to `REQUESTS` and `LONG`."""
    model = make_model("llama")
    alone = start_vllm(fleet, "alone", model, place)
    few = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"]
    flags = [*store_flags("0", place), *few]
    server = start_vllm(fleet, "server", model, place, flags, core=1)
    wait_ready([alone, server])
    expected = answered(alone), answered(alone, LONG)
    alone.stop()
    return server, *expected


@pytest.fixture(scope="module")
def server(servers: tuple[VllmServer, list[Answer], list[Answer]]) -> VllmServer:
    return servers[0]


@pytest.fixture(scope="module")
def expected(servers: tuple[VllmServer, list[Answer], list[Answer]]) -> list[Answer]:
    return servers[1]


@pytest.fixture(scope="module")
def expected_of_long(servers: tuple[VllmServer, list[Answer], list[Answer]]) -> list[Answer]:
    return servers[2]


@pytest.fixture(scope="module")
def stored(server: VllmServer, expected: list[Answer], owner: Store) -> Store:
    """All prompts are computed once, and their pages lie in the owner's memory."""
    answers = answered(server)
    assert not compare(expected, answers)
    assert cached(answers) == [0] * len(REQUESTS)
    until(lambda: len(owner) >= PAGES, f"{PAGES} pages are stored")
    return owner


def answered(server: VllmServer, requests: list[Request] = REQUESTS) -> list[Answer]:
    answers = ask(server, requests)
    errors = [one.error for one in answers if one.error]
    assert not errors, f"{errors[0]}\n{server.process.tail()}"
    return answers


def cached(answers: list[Answer]) -> list[int]:
    return [one.cached_tokens for one in answers]


def uses_its_own(server: VllmServer, place: Path) -> bool:
    """Whether all of its processes use an owner that it has started."""
    names = {f"process {pid}" for pid in pids(place)}
    group = server.process.pid
    mine = [one for one in statuses(place / "te") if os.getpgid(one.pid) == group]
    return bool(mine) and all(
        any(owner.usable and owner.name in names for owner in one.owners) for one in mine
    )


def gets(server: VllmServer, place: Path) -> Counter[str]:
    return outcomes(place / "te", server.process.pid)


def more(server: VllmServer, place: Path, before: Counter[str]) -> Counter[str]:
    return gets(server, place) - before


def test_a_prompt_that_was_stored_is_loaded(
    server: VllmServer, expected: list[Answer], stored: Store, place: Path
) -> None:
    before = gets(server, place)
    reset(server)
    answers = answered(server)
    assert not compare(expected, answers)
    assert cached(answers) == CACHED
    assert more(server, place, before) == Counter(right=PAGES)


def test_requests_that_are_preempted_store_no_wrong_pages(
    server: VllmServer, expected_of_long: list[Answer], stored: Store, place: Path
) -> None:
    assert not compare(expected_of_long, answered(server, LONG))
    assert server.metric("vllm:num_preemptions_total") > 0, "blocks are used again under saves"
    before = gets(server, place)
    reset(server)
    assert not compare(expected_of_long, answered(server, LONG))
    assert more(server, place, before)["right"] > 0


def test_a_server_with_other_weights_takes_nothing(
    fleet: Fleet, expected: list[Answer], stored: Store, place: Path
) -> None:
    stranger = start_vllm(
        fleet,
        "stranger",
        make_model("llama"),
        place,
        store_flags("0", place, **OTHERS),
    )
    wait_ready([stranger])
    answers = answered(stranger)
    assert not compare(expected, answers)
    assert cached(answers) == [0] * len(REQUESTS)
    assert not gets(stranger, place)
    stranger.stop()


def test_pages_that_were_spoilt_are_computed(
    server: VllmServer, expected: list[Answer], stored: Store, place: Path
) -> None:
    before = gets(server, place)
    own = stored._owners.own
    assert own is not None
    pages = np.frombuffer(own._buffer, np.uint8)[own._slab.slots_offset :]
    pages ^= 0xFF  # headers lie before them, and still say what was here
    reset(server)
    answers = answered(server)
    assert not compare(expected, answers)
    found = more(server, place, before)
    assert found["corrupted"] > 0
    assert not found["right"]


def test_pages_whose_owner_is_gone_are_computed(
    server: VllmServer,
    expected: list[Answer],
    stored: Store,
    place: Path,
    hosting: ExitStack,
) -> None:
    # What was spoilt was removed, and is stored again.
    reset(server)
    answered(server)
    until(lambda: len(stored) >= PAGES, "the pages are stored again")
    hosting.close()
    # Until then it reads what the former one had, which is mapped there.
    until(lambda: uses_its_own(server, place), "the server has started an owner itself")
    before = gets(server, place)
    reset(server)
    answers = answered(server)
    assert not compare(expected, answers)
    assert not more(server, place, before)["right"]
