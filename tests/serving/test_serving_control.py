# SPDX-License-Identifier: Apache-2.0
"""Negative control: tokens are equal because bytes arrive, and differ when they do not."""

from __future__ import annotations

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.traffic import compare, make_requests, send_all

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout.equal("suppressed", extra_env={"CPU_SERVING_WITHOUT_KV": "1"})


def test_without_the_payload_the_tokens_differ(serving: Serving) -> None:
    requests = make_requests(20, 300, seed=21)
    got = send_all(serving.url, requests, 8)
    assert not [answer.error for answer in got if answer.error]
    long = [i for i, request in enumerate(requests) if len(request.input_ids) > 30]
    different = set(compare(serving.expected(requests), got))
    assert set(long) <= different
