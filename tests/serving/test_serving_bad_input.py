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


@pytest.fixture(scope="module")
def fitting(fleet: Fleet, prefill: Server) -> Server:
    return fleet.server("decode", prefill.options, name="decode-fitting")


@pytest.fixture(scope="module")
def other_secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "secret"
    write_secret_file(path)
    return path


@pytest.fixture(scope="module")
def stranger(fleet: Fleet, prefill: Server, other_secret: Path) -> Server:
    """A decode server with another secret. It is told of the prefill server's registry, and says at
    its start that its secret is another one."""
    options = with_secret(prefill.options, other_secret)
    told = {"SGLANG_MOONCAKE_REGISTRY": f"{HOST}:{prefill.bootstrap_port}"}
    options = replace(options, extra_env={**options.extra_env, **told})
    return fleet.server("decode", options, name="decode-secret")


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
    fleet: Fleet, name: str, prefill: Server, decode: Server, sentence: str
) -> None:
    """The decode server has said the sentence, and so has the router, if it passes errors on."""
    kinds: tuple[RouterKind, ...] = ("sglang-router", "mini-lb")
    routers = [fleet.router(prefill, decode, name=f"{kind}-{name}", kind=kind) for kind in kinds]
    wait_ready([prefill, decode, *routers])
    rust, passing_on = routers
    # sglang-router tries again, and soon says of itself that no server is left; at first it does so
    # before it has found out that there is one.
    deadline_s = time.monotonic() + BOUND_S
    while sentence not in decode.process.log_text():
        assert time.monotonic() < deadline_s, "the decode server was never asked"
        assert_ended(rust, (prefill, decode))
    assert_ended(passing_on, (prefill, decode), sentence)
    for router in routers:
        router.stop()


def test_another_model_ends_requests_on_both_servers(fleet: Fleet, prefill: Server) -> None:
    """One whose caches have the same shapes."""
    options = replace(prefill.options, model=make_model("qwen3"))
    decode = fleet.server("decode", options, name="decode-model")
    sentence = "model is LlamaForCausalLM (3 layers of 128"
    assert_ended_with(fleet, "model", prefill, decode, sentence)
    said = [
        line for line in decode.process.log_text().splitlines() if "prefill instance at" in line
    ]
    assert len([line for line in said if "Qwen3ForCausalLM" in line]) == 1, said
    decode.stop()


def test_another_secret_ends_requests_on_both_servers(
    fleet: Fleet, prefill: Server, stranger: Server
) -> None:
    sentence = "does not prove that it has our secret"
    assert_ended_with(fleet, "secret", prefill, stranger, sentence)


def test_another_bootstrap_port_ends_requests_on_both_servers(
    fleet: Fleet, prefill: Server, fitting: Server
) -> None:
    elsewhere = copy.copy(prefill)
    elsewhere.bootstrap_port = fleet.port()
    router = fleet.router(elsewhere, fitting, name="router-port")
    Pair(prefill, fitting, router).wait_ready()
    assert_ended(router, (prefill, fitting), str(elsewhere.bootstrap_port), "cannot be reached")
    assert f"the request names the bootstrap port {elsewhere.bootstrap_port}" in (
        prefill.process.log_text()
    )
    router.stop()


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


def test_servers_of_the_mismatch_still_serve(
    fleet: Fleet, prefill: Server, fitting: Server
) -> None:
    """The prefill server that was talked to by strangers serves a decode server that fits."""
    router = fleet.router(prefill, fitting, name="router-fitting")
    wait_ready([prefill, fitting, router])
    answers = send_all(router.url, make_requests(6, 300), 6, timeout_s=BOUND_S)
    assert not [answer.error for answer in answers if answer.error]


def test_a_prefill_server_that_was_mended_is_served_without_a_restart_of_decode(
    fleet: Fleet, prefill: Server, stranger: Server, other_secret: Path
) -> None:
    """The last test: it ends the prefill server of the others."""
    address = f"{HOST}:{prefill.bootstrap_port}"
    wait_ready([stranger, prefill])
    await_line(stranger, f"the registry {address} does not serve this server: ")
    prefill.stop()
    mended = fleet.server(
        "prefill",
        with_secret(prefill.options, other_secret),
        name="prefill-mended",
        port=prefill.port,
        bootstrap_port=prefill.bootstrap_port,
    )
    router = fleet.router(mended, stranger, name="router-mended")
    Pair(mended, stranger, router).wait_ready()
    await_line(stranger, f"the registry {address} fits this server now")
    answers = send_all(router.url, make_requests(3, 100), 3, timeout_s=BOUND_S)
    assert not [answer.error for answer in answers if answer.error]


def await_line(server: Server, line: str) -> None:
    deadline_s = time.monotonic() + BOUND_S
    while line not in server.process.log_text():
        assert time.monotonic() < deadline_s, f"the log never said: {line}"
        time.sleep(0.1)
