# SPDX-License-Identifier: Apache-2.0
"""KV pools that a driver without a GPU reports as CUDA memory: all of te's way for it, but the GPU.

Its copies are late (`cpu_serving/shim/cpu_cuda.py`): a wait that is missing anywhere shows
as a token that differs.
"""

from __future__ import annotations

import time

import pytest
from cpu_serving.cuda import PretendedCuda, build_driver, read_cuda_counts
from cpu_serving.expectations import VERIFIED, Layout, Serving
from cpu_serving.traffic import make_requests

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    driver = build_driver(tmp_path_factory.mktemp("driver"))
    return Layout.equal("cuda", page_size=16, cuda=PretendedCuda(driver), extra_env=VERIFIED)


def test_tokens_are_equal_although_copies_are_late(serving: Serving) -> None:
    serving.assert_equal(make_requests(12, 300, seed=31), concurrency=6)
    for server in (serving.pair.prefill, serving.pair.decode):
        counts = read_cuda_counts(server.stats_dir, 1, time.time())
        assert counts.batches > 0, f"the {server.role} server staged nothing"
        assert counts.pageable_copies == 0
        assert counts.synchronising_calls == 0, "SGLang's scheduler may have waited for the GPU"
