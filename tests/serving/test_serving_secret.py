# SPDX-License-Identifier: Apache-2.0
"""Servers that share a secret: served as ever, and nobody else learns or changes anything."""

from __future__ import annotations

import pytest
import requests
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.servers import HOST, ServerOptions, with_secret
from cpu_serving.traffic import make_requests
from serving_layouts import BY_QUERY

from bootstrap_server.secret_file import write_secret_file

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """Decode asks the registry which DP rank has a request, by SGLang's own code."""
    path = tmp_path_factory.mktemp("secret") / "secret"
    write_secret_file(path)
    model = make_model("qwen3")
    prefill = ServerOptions(model, tp=2, dp_attention=True, extra_args=BY_QUERY)
    servers = (with_secret(options, path) for options in (prefill, ServerOptions(model)))
    return Layout("secret", "qwen3", *servers)


def test_tokens_are_equal_and_strangers_get_nothing(serving: Serving) -> None:
    serving.assert_equal(make_requests(6, 100, seed=96), concurrency=6)
    registry = f"http://{HOST}:{serving.pair.prefill.bootstrap_port}"
    for method, path in (
        ("GET", "/v1/instances/default"),
        ("PUT", "/route"),
        ("POST", "/register_dp_rank"),
        ("POST", "/query_dp_ranks"),
    ):
        answer = requests.request(method, registry + path, json={}, timeout=60)
        assert (answer.status_code, answer.content) == (401, b"")
    assert requests.get(f"{registry}/health", timeout=60).text == "OK"
