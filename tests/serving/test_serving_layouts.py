# SPDX-License-Identifier: Apache-2.0
"""Equal tokens in every layout, whether both servers share it or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import LAYERS
from cpu_serving.traffic import make_requests
from serving_layouts import LAYOUTS, Case

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

PARAMS = [
    pytest.param(case, id=name, marks=pytest.mark.by_turns(name)) for name, case in LAYOUTS.items()
]


@pytest.fixture(scope="module", params=PARAMS)
def layout(request: pytest.FixtureRequest) -> Layout:
    case: Case = request.param
    return case.layout()


def test_the_pool_is_the_one_meant(serving: Serving) -> None:
    for server in (serving.pair.prefill, serving.pair.decode):
        layers = 1 if serving.model == "mellum" else LAYERS  # without those of windows
        layers //= server.options.pp  # of one stage; the last one may have one more
        kind = "MLA buffers" if serving.model == "deepseek" else "K and V buffers"
        count = layers if serving.model == "deepseek" else 2 * layers
        assert f"{count} {kind}" in server.process.log_text()


def test_tokens_are_equal(serving: Serving) -> None:
    serving.assert_equal(make_requests(40, 900, seed=11), concurrency=16)


def test_prefixes_seen_before(serving: Serving) -> None:
    """The same prompts again, then prompts that continue them: cached pages on either side."""
    requests = make_requests(10, 500, seed=12)
    serving.assert_equal(requests, concurrency=8)
    serving.assert_equal(requests, concurrency=8)
    tails = make_requests(10, 60, seed=13)
    longer = [
        replace(request, input_ids=request.input_ids + tail.input_ids)
        for request, tail in zip(requests, tails, strict=True)
    ]
    serving.assert_equal(longer, concurrency=8)
