# SPDX-License-Identifier: Apache-2.0
"""SGLang's own backend of NIXL, unmodified, over te. Each run has one number of TP ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cpu_serving.expectations import Reference
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, ServerOptions
from cpu_serving.traffic import compare, make_requests, send_all

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

REQUESTS = make_requests(6, 600, seed=33)


@pytest.fixture
def fleet(nursery: Nursery, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.mark.parametrize(
    "tp", [pytest.param(tp, marks=pytest.mark.one_of("nixl-tp", str(tp))) for tp in (1, 2)]
)
def test_a_pair_answers_as_one_server(fleet: Fleet, reference: Reference, tp: int) -> None:
    expected = reference.answers("llama", REQUESTS)
    options = ServerOptions(
        make_model("llama"),
        tp=tp,
        extra_args=("--disaggregation-transfer-backend", "nixl"),
        extra_env={"SGLANG_MOONCAKE_DROP_IN": "1"},
    )
    pair = fleet.pair(options, options)
    pair.wait_ready()
    answers = send_all(pair.router.url, REQUESTS, concurrency=4)
    assert not [one.error for one in answers if one.error]
    assert not compare(expected, answers)
    for server in (pair.prefill, pair.decode):
        log = server.process.log_text()
        assert "mooncake.engine and nixl are te, and mooncake.store is kvstore" in log
        assert log.count("nixl is te: agent") == tp
