# SPDX-License-Identifier: Apache-2.0
"""vLLM's own connectors of NIXL over te: the one whose prefill server writes, and servers with
several TP ranks. Each run has one of them. They start by the command that users type."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from cpu_serving.model import make_model
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import compare, make_requests
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import (
    ask,
    imported_tokens,
    nixl_flags,
    reset,
    side_channel,
    start_vllm,
)

# A TP rank takes 20 CPU-seconds to start.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

REQUESTS = make_requests(4, 600, seed=31)
TOKENS = sum(len(one.input_ids) for one in REQUESTS)


def layout(connector: str, prefill_tp: int, decode_tp: int) -> Any:
    name = f"{connector}-{prefill_tp}-{decode_tp}"
    mark = pytest.mark.one_of("nixl-layouts", name)
    return pytest.param(connector, prefill_tp, decode_tp, id=name, marks=mark)


@pytest.mark.parametrize(
    ("connector", "prefill_tp", "decode_tp"),
    [
        layout("NixlPushConnector", 1, 1),
        layout("NixlPushConnector", 2, 2),
        layout("NixlConnector", 2, 1),
        layout("NixlConnector", 1, 2),
        layout("NixlConnector", 2, 2),
    ],
)
def test_a_pair_answers_as_one_server(
    connector: str, prefill_tp: int, decode_tp: int, tmp_path: Path
) -> None:
    model = make_model("llama")
    with tempfile.TemporaryDirectory(prefix="kv") as directory, Fleet(tmp_path) as fleet:
        place = Path(directory)
        prefill, decode = (
            start_vllm(
                fleet,
                role,
                model,
                place,
                nixl_flags(role, connector=connector),
                core,
                tp,
                more_env=side_channel(fleet.port()),
                by_run=True,
            )
            for core, (role, tp) in enumerate(
                [("kv_producer", prefill_tp), ("kv_consumer", decode_tp)]
            )
        )
        wait_ready([prefill, decode])
        # Of whom nobody asks for a hand-over, that is an ordinary server.
        expected = ask(prefill, REQUESTS)
        reset(prefill)
        with Proxy(prefill.url, decode.url) as proxy:
            answers = ask(proxy, REQUESTS)
        assert not compare(expected, answers), [one.error for one in (*expected, *answers)]
        assert TOKENS - imported_tokens(decode) <= len(REQUESTS), "a last token may be computed"
        for server in (prefill, decode):
            assert "mooncake.engine and nixl are te" in server.process.log_text()
