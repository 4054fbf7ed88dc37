# SPDX-License-Identifier: Apache-2.0
"""A prefill server of vLLM on the CPU with two TP ranks, and decode servers with one and with two,
answer as one ordinary server does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_serving.nursery import Nursery
from cpu_serving.traffic import make_requests
from pd_servers import Servers, started

# A server with two ranks has four processes.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Servers]:
    requests = make_requests(4, 600, seed=37)
    with started(tmp_path_factory, nursery, "llama", requests, [1, 2]) as servers:
        yield servers


@pytest.mark.parametrize("tp", [1, 2])
def test_servers_with_other_numbers_of_ranks_answer_as_one_server(
    servers: Servers, tp: int
) -> None:
    servers.check_answers(tp)
