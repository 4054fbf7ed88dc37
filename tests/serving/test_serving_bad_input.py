# SPDX-License-Identifier: Apache-2.0
"""Servers that do not fit together, or cannot start, say so in one sentence and do not hang."""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import (
    HOST,
    Fleet,
    Pair,
    Router,
    RouterKind,
    Server,
    ServerOptions,
    wait_ready,
    with_secret,
)
from cpu_serving.traffic import make_requests, send_all
from patient import patient

from bootstrap_server.admission.secret_file import write_secret_file

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

BOUND_S = 180.0
START_BOUND_S = 400.0


@pytest.fixture(scope="module")
def fleet(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("mismatch"), nursery) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def prefill(fleet: Fleet) -> Server:
    return fleet.server("prefill", patient(ServerOptions(make_model("llama"), page_size=16)))


MISMATCHES = {
    "page size": (
        ServerOptions(make_model("llama"), page_size=1),
        ("--page-size", "16", "1"),
    ),
    "dtype": (
        ServerOptions(
            make_model("llama"), page_size=16, extra_args=("--kv-cache-dtype", "bfloat16")
        ),
        ("--kv-cache-dtype", "float32", "bfloat16"),
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_fails_the_request_with_a_sentence(
    fleet: Fleet, prefill: Server, what: str
) -> None:
    options, words = MISMATCHES[what]
    decode = fleet.server("decode", patient(options), name=f"decode-{what.replace(' ', '-')}")
    router = fleet.router(prefill, decode, name=f"router-{what.replace(' ', '-')}")
    pair = Pair(prefill, decode, router)
    pair.wait_ready()
    for answer in send_all(router.url, make_requests(3, 100), 3, timeout_s=BOUND_S):
        assert answer.error is not None
        missing = [word for word in words if word not in answer.error]
        assert not missing, f"the error does not name {missing}: {answer.error}"
    for server in (prefill, decode):
        assert leaked_pages(server, timeout_s=BOUND_S) == 0
    router.stop()
    decode.stop()


def assert_ended(router: Router, servers: Sequence[Server], *words: str) -> None:
    """Long before any deadline of SGLang, which are five minutes."""
    for answer in send_all(router.url, make_requests(3, 100), 3, timeout_s=BOUND_S):
        assert answer.error is not None
        missing = [word for word in words if word not in answer.error]
        assert not missing, f"the error does not name {missing}: {answer.error}"
    for server in servers:
        assert leaked_pages(server, timeout_s=BOUND_S) == 0


def assert_ended_with(
    router: Router, decode: Server, servers: Sequence[Server], sentence: str, kind: RouterKind
) -> None:
    """The decode server has said the sentence, and so has the router, if it passes errors on."""
    # sglang-router tries again, and soon says of itself that no server is left; at first it does so
    # before it has found out that there is one.
    words = () if kind == "sglang-router" else (sentence,)
    deadline_s = time.monotonic() + BOUND_S
    while sentence not in decode.process.log_text():
        assert time.monotonic() < deadline_s, "the decode server was never asked"
        assert_ended(router, servers, *words)


@pytest.mark.parametrize("kind", ["mini-lb", "sglang-router"])
def test_another_model_ends_requests_on_both_servers(
    fleet: Fleet, prefill: Server, kind: RouterKind
) -> None:
    """One whose caches have the same shapes."""
    options = replace(prefill.options, model=make_model("qwen3"))
    name = f"model-{kind}"
    decode = fleet.server("decode", options, name=f"decode-{name}")
    router = fleet.router(prefill, decode, name=f"router-{name}", kind=kind)
    Pair(prefill, decode, router).wait_ready()
    sentence = "model is LlamaForCausalLM (3 layers of 128"
    assert_ended_with(router, decode, (prefill, decode), sentence, kind)
    said = [
        line for line in decode.process.log_text().splitlines() if "prefill instance at" in line
    ]
    assert len([line for line in said if "Qwen3ForCausalLM" in line]) == 1, said
    router.stop()
    decode.stop()


@pytest.mark.parametrize("kind", ["mini-lb", "sglang-router"])
def test_another_secret_ends_requests_on_both_servers(
    fleet: Fleet, prefill: Server, tmp_path: Path, kind: RouterKind
) -> None:
    write_secret_file(tmp_path / "secret")
    options = with_secret(prefill.options, tmp_path / "secret")
    name = f"secret-{kind}"
    decode = fleet.server("decode", options, name=f"decode-{name}")
    router = fleet.router(prefill, decode, name=f"router-{name}", kind=kind)
    Pair(prefill, decode, router).wait_ready()
    sentence = "does not prove that it has our secret"
    assert_ended_with(router, decode, (prefill, decode), sentence, kind)
    router.stop()
    decode.stop()


def test_another_bootstrap_port_ends_requests_on_both_servers(
    fleet: Fleet, prefill: Server
) -> None:
    decode = fleet.server("decode", prefill.options, name="decode-port")
    elsewhere = copy.copy(prefill)
    elsewhere.bootstrap_port = fleet.port()
    router = fleet.router(elsewhere, decode, name="router-port")
    Pair(prefill, decode, router).wait_ready()
    assert_ended(router, (prefill, decode), str(elsewhere.bootstrap_port), "cannot be reached")
    assert f"the request names the bootstrap port {elsewhere.bootstrap_port}" in (
        prefill.process.log_text()
    )
    router.stop()
    decode.stop()


def test_taken_bootstrap_port_stops_the_server_with_a_sentence(
    nursery: Nursery, tmp_path: Path
) -> None:
    with socket.create_server((HOST, 0)) as squatter, Fleet(tmp_path, nursery) as fleet:
        port = squatter.getsockname()[1]
        options = ServerOptions(make_model("llama"))
        server = fleet.server("prefill", options, bootstrap_port=port)
        assert server.process.wait(START_BOUND_S) != 0
        said = [line for line in server.process.log_text().splitlines() if str(port) in line]
        assert any("bootstrap" in line and "in use" in line for line in said), said


def test_servers_of_the_mismatch_still_serve(fleet: Fleet, prefill: Server) -> None:
    """The prefill server that was talked to by strangers serves a decode server that fits."""
    decode = fleet.server("decode", prefill.options, name="decode-fitting")
    router = fleet.router(prefill, decode, name="router-fitting")
    wait_ready([prefill, decode, router])
    answers = send_all(router.url, make_requests(6, 300), 6, timeout_s=BOUND_S)
    assert not [answer.error for answer in answers if answer.error]


def test_a_prefill_server_that_was_mended_is_served_without_a_restart_of_decode(
    fleet: Fleet, prefill: Server, tmp_path: Path
) -> None:
    """The last test: it ends the prefill server of the others. The decode server is told of its
    registry, and says at its start that its secret is another one."""
    write_secret_file(tmp_path / "secret")
    options = with_secret(prefill.options, tmp_path / "secret")
    address = f"{HOST}:{prefill.bootstrap_port}"
    told = {**options.extra_env, "SGLANG_MOONCAKE_REGISTRY": address}
    decode = fleet.server("decode", replace(options, extra_env=told), name="decode-waits")
    wait_ready([prefill, decode])
    await_line(decode, f"the registry {address} does not serve this server: ")
    prefill.stop()
    mended = fleet.server(
        "prefill",
        options,
        name="prefill-mended",
        port=prefill.port,
        bootstrap_port=prefill.bootstrap_port,
    )
    router = fleet.router(mended, decode, name="router-mended")
    Pair(mended, decode, router).wait_ready()
    await_line(decode, f"the registry {address} fits this server now")
    answers = send_all(router.url, make_requests(3, 100), 3, timeout_s=BOUND_S)
    assert not [answer.error for answer in answers if answer.error]


def await_line(server: Server, line: str) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while line not in server.process.log_text():
        assert time.monotonic() < deadline_s, f"the log never said: {line}"
        time.sleep(0.1)
