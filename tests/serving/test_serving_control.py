# SPDX-License-Identifier: Apache-2.0
"""Negative control: tokens are equal because bytes arrive, and differ when they do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cpu_serving.expectations import Reference, Serving
from cpu_serving.nursery import Nursery
from cpu_serving.servers import Fleet, Pair, Server
from cpu_serving.traffic import compare, make_requests, send_all
from patient import patient

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def running(
    decode: Server,
    nursery: Nursery,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    with Fleet(tmp_path_factory.mktemp("suppressed"), nursery) as fleet:
        without = replace(decode.options, extra_env={"CPU_SERVING_WITHOUT_KV": "1"})
        prefill = fleet.server("prefill", patient(without))
        pair = Pair(prefill, decode, fleet.router(prefill, decode))
        pair.wait_ready()
        yield Serving(pair, "llama", reference)


def test_without_the_payload_the_tokens_differ(serving: Serving) -> None:
    requests = make_requests(20, 300, seed=21)
    got = send_all(serving.url, requests, 8)
    # One request in 256 is compared by digests, which find what has not come.
    errors = [answer.error for answer in got if answer.error]
    assert all("what arrived is not what" in one for one in errors), errors
    long = [i for i, request in enumerate(requests) if len(request.input_ids) > 30]
    different = set(compare(serving.expected(requests), got))
    assert set(long) <= different
