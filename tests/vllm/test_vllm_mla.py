# SPDX-License-Identifier: Apache-2.0
"""Servers of vLLM on the CPU with a model whose KV cache is one latent (MLA), which each TP rank
has as a whole: a prefill and a decode server answer as one ordinary server does. They start as a
user's do, as programs, and look for each other's messages without a pause."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_serving.servers import RESTING
from cpu_serving.traffic import make_requests
from pd_servers import Servers, started

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: vLLM's kernels for a latent on any CPU, and their blocks. On one with AMX it prefers others,
#: which refuse a model as small and numbers as wide as these.
KERNELS = ["--attention-backend", "CPU_MLA", "--block-size", "16"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    requests = make_requests(4, 600, seed=43)
    with pytest.MonkeyPatch.context() as patch:
        for name in RESTING:
            patch.delenv(name)
        with started(tmp_path_factory, None, "deepseek-wide", requests, [1], KERNELS) as servers:
            yield servers


def test_a_pair_with_a_latent_answers_as_one_server(servers: Servers) -> None:
    servers.check_answers(decode_tp=1)
