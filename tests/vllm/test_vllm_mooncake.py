# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors of Mooncake and of Mooncake's store, unmodified, over te and kvstore. Each
run has one number of TP ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.ports import HOST
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, Request, compare, make_requests
from cpu_serving.vllm_servers import (
    BLOCK,
    VllmServer,
    ask,
    ask_mooncake_pair,
    imported_tokens,
    mooncake_flags,
    mooncake_store_flags,
    reset,
    start_vllm,
)
from store_host import store_directory

from sglang_mooncake.sglang.running import environment_for

# A TP rank takes 20 CPU-seconds to start.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.by_turns("mooncake")]

REQUESTS = make_requests(4, 600, seed=31)
PAGES = sum(len(one.input_ids) // BLOCK for one in REQUESTS)
WAIT_S = 60.0
REPLACED = "mooncake.engine and nixl are te, and mooncake.store is kvstore, in this process"
by_tp = pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=pytest.mark.one_of("mooncake-tp", str(tp))) for tp in (1, 2)]
)


@dataclass
class Place:
    """Where the servers run, and what an ordinary one answers."""

    fleet: Fleet
    path: Path
    model: Path
    expected: Sequence[Answer]

    def start(
        self, name: str, flags: Sequence[str], core: int, tp: int, environment: Mapping[str, str]
    ) -> VllmServer:
        """As `sglang-mooncake run` would."""
        given = {**environment_for({}), **environment}
        return start_vllm(self.fleet, name, self.model, self.path, flags, core, tp, more_env=given)

    def log(self, name: str) -> str:
        return (self.fleet.run_dir / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Place]:
    model = make_model("llama")
    logs = tmp_path_factory.mktemp("vllm")
    with store_directory() as path, Fleet(logs, nursery) as fleet:
        alone = start_vllm(fleet, "alone", model, path)
        wait_ready([alone])
        expected = good(ask(alone, REQUESTS))
        alone.stop()
        yield Place(fleet, path, model, expected)


def good(answers: list[Answer]) -> list[Answer]:
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


@by_tp
def test_a_pair_answers_as_one_server(place: Place, tp: int) -> None:
    port = place.fleet.port()
    registry = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}
    prefill, decode = (
        place.start(name, mooncake_flags(role), core, tp, registry)
        for core, (name, role) in enumerate([("prefill", "kv_producer"), ("decode", "kv_consumer")])
    )
    wait_ready([prefill, decode])

    def asked(request: Request) -> Answer:
        return ask_mooncake_pair(prefill, f"http://{HOST}:{port}", decode, request)

    answers = good([asked(one) for one in REQUESTS])
    assert not compare(place.expected, answers)
    assert imported_tokens(decode) >= PAGES * BLOCK
    for name in ("prefill", "decode"):
        assert REPLACED in place.log(name)
    prefill.stop()
    decode.stop()


@by_tp
def test_a_server_finds_in_the_store_what_another_has_computed(place: Place, tp: int) -> None:
    settings = place.path / "mooncake.json"
    settings.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{HOST}:50051",
                "protocol": "tcp",
                "global_segment_size": "64mb",
                "local_buffer_size": "16mb",
            }
        )
    )
    environment = {
        "MOONCAKE_CONFIG_PATH": str(settings),
        "SGLANG_MOONCAKE_STORE": json.dumps({"directory": str(place.path / f"kv{tp}")}),
    }
    first, second = (
        place.start(name, mooncake_store_flags(), core, tp, environment)
        for core, name in enumerate(["first", "second"])
    )
    wait_ready([first, second])
    assert not compare(place.expected, good(ask(first, REQUESTS)))
    assert not imported_tokens(first)
    assert not compare(place.expected, good(ask(second, REQUESTS)))
    assert imported_tokens(second), "what was put last may not have been there yet"
    for name in ("first", "second"):
        assert REPLACED in place.log(name)
    deadline_s = time.monotonic() + WAIT_S
    all_of_them = 0.0
    while all_of_them < (PAGES - len(REQUESTS)) * BLOCK:  # A prompt's last token is computed.
        assert time.monotonic() < deadline_s
        reset(second)
        before = imported_tokens(second)
        assert not compare(place.expected, good(ask(second, REQUESTS)))
        all_of_them = imported_tokens(second) - before
    first.stop()
    second.stop()
