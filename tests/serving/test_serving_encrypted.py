# SPDX-License-Identifier: Apache-2.0
"""Servers that encrypt what goes between them: equal tokens, and KV caches over encrypted
connections alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.servers import ServerOptions, with_secret
from cpu_serving.traffic import make_requests

from bootstrap_server.admission.secret_file import write_secret_file

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

SETTINGS = {"SGLANG_MOONCAKE_ENCRYPT": "1", "SGLANG_MOONCAKE_TRANSPORTS": "tcp"}


def encrypting(options: ServerOptions, secret: Path) -> ServerOptions:
    options = with_secret(options, secret)
    return replace(options, extra_env={**options.extra_env, **SETTINGS})


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    secret = tmp_path_factory.mktemp("secret") / "secret"
    write_secret_file(secret)
    model = make_model("llama")
    servers = (ServerOptions(model, tp=2), ServerOptions(model))
    return Layout("encrypted", "llama", *(encrypting(one, secret) for one in servers))


def test_tokens_are_equal_and_nothing_goes_in_plain(serving: Serving) -> None:
    serving.assert_equal(make_requests(24, 700, seed=97), concurrency=8)
    ways = [
        line
        for line in serving.pair.prefill.process.log_text().splitlines()
        if " writes to " in line
    ]
    assert len(ways) >= 2, "both prefill ranks"
    assert all(" over tcp, encrypted" in line for line in ways)
