# SPDX-License-Identifier: Apache-2.0
"""Servers that share a secret: served as ever, and nobody else learns or changes anything."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from cpu_serving.expectations import Layout, Serving
from cpu_serving.model import make_model
from cpu_serving.servers import HOST, ServerOptions, with_secret
from cpu_serving.strangers import (
    Process,
    Stranger,
    listeners,
    of_group,
    proved_request,
    sayings,
)
from cpu_serving.traffic import make_requests
from serving_layouts import BY_QUERY

from bootstrap_server import BootstrapClient, Instance
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_secret_file, write_secret_file
from te.connect.greeting import GREETING, MAGIC, GreetingKind
from te.handshake import PROTOCOL_VERSION

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]


STRANGERS = 10_000
WAIT_S = 60.0
#: Longer than a process of a busy machine is not run; all ports are asked at once.
ANSWER_S = 20.0
MIB = 1 << 20
KINDS = ("registry", "control", "engine")
#: In lines of the log, which a stranger must not fill.
ABOUT_STRANGERS = ("refused", "closing the connection", "ended a control", "broke the protocol")


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "secret"
    write_secret_file(path)
    return path


@pytest.fixture(scope="module")
def layout(secret: Path) -> Layout:
    """Decode asks the registry which DP rank has a request, by SGLang's own code."""
    model = make_model("qwen3")
    prefill = ServerOptions(model, tp=2, dp_attention=True, extra_args=BY_QUERY)
    servers = (with_secret(options, secret) for options in (prefill, ServerOptions(model)))
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


# --- all ports, found by scanning ---


@pytest.fixture
def descriptors_enough() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.1)


def ports_of_ours(serving: Serving, instance: Instance) -> dict[int | str, str]:
    """Where our packages listen, and as what; the rest is SGLang's own."""
    pair = serving.pair
    groups = [[one.pid for one in of_group(s.process.pid)] for s in (pair.prefill, pair.decode)]
    found = listeners(pid for group in groups for pid in group)
    ours: dict[int | str, str] = {pair.prefill.bootstrap_port: "registry"}
    ours |= {rank.port: "control" for rank in instance.ranks}
    assert ours.keys() <= {one.where for one in found}
    ranks = pair.prefill.options.ranks + pair.decode.options.ranks
    abstract = [one for one in found if str(one.where).startswith("@te-")]
    assert len(abstract) == ranks, "an engine in each rank"
    schedulers = {one.pid for one in abstract}
    tcp = [one.where for one in found if one.pid in schedulers and isinstance(one.where, int)]
    others = [port for port in tcp if port not in ours]
    with ThreadPoolExecutor(len(others)) as pool:  # those of SGLang's do not answer
        engines = [
            port for port, yes in zip(others, pool.map(is_engine, others), strict=True) if yes
        ]
    assert len(engines) == ranks
    return ours | dict.fromkeys([one.where for one in abstract] + engines, "engine")


def is_engine(port: int) -> bool:
    """Whether te answers there: one that does not know our version says so."""
    with socket.create_connection((HOST, port), timeout=WAIT_S) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.sendall(GREETING.pack(MAGIC, PROTOCOL_VERSION + 1, GreetingKind.CALL, 0))
            return sock.recv(len(MAGIC)) == MAGIC
        except OSError:
            return False


def useful(instance: Instance, ours: dict[int | str, str]) -> list[bytes]:
    """What a stranger must not hear: of whom there are, and by which names and numbers."""
    found = [str(place).removeprefix("@te-").encode() for place in ours if isinstance(place, str)]
    found += [bytes.fromhex(text.decode()) for text in found]
    for rank in instance.ranks:
        found += [rank.control_key.encode(), rank.epoch.to_bytes(8, "little")]
        found += [str(rank.epoch).encode(), str(rank.port).encode(), rank.host.encode()]
    return found


def assert_says_nothing(kind: str, name: str, answer: bytes) -> None:
    """At most the fixed bytes of the protocol."""
    what = f"{kind}, {name}: {answer[:400]!r}"
    if kind == "control":
        # The greeting of ZMTP, and nothing behind it.
        assert len(answer) <= 64, what
        assert (b"\xff" + bytes(7) + b"\x01\x7f\x03\x01CURVE").ljust(64, b"\0").startswith(answer)
    elif kind == "registry":
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head[9:12]
        assert not answer or status in (b"200", b"400", b"401", b"408", b"429", b"431"), what
        assert b"Server:" not in head or status == b"400", what
        if status in (b"401", b"429"):
            assert not body, what
    else:
        refused = GREETING.pack(MAGIC, PROTOCOL_VERSION, GreetingKind.REFUSE, 0)
        challenge = struct.pack("<8sHHI", MAGIC, PROTOCOL_VERSION, GreetingKind.CHALLENGE, 72)
        if name == "a hello that proves nothing":
            assert answer[:16] in (b"", challenge), what
            assert answer[88:] in (b"", refused), what
        else:
            assert answer in (b"", refused), what


@pytest.mark.usefixtures("descriptors_enough")
def test_ten_thousand_strangers_cost_no_request_and_hear_nothing(
    serving: Serving, secret: Path
) -> None:
    keys = Keys.from_secrets(read_secret_file(secret))
    others = Keys.from_secrets([b"0123456789abcdef-of-strangers"])
    prefill, decode = serving.pair.prefill.process, serving.pair.decode.process
    with BootstrapClient(
        f"{HOST}:{serving.pair.prefill.bootstrap_port}", timeout_s=WAIT_S, keys=keys.registry
    ) as client:
        instance = client.instance()
    ours = ports_of_ours(serving, instance)
    work = make_requests(12, 100, seed=97)
    serving.assert_equal(work, concurrency=6)
    before = {one.pid: one for server in (prefill, decode) for one in of_group(server.pid)}
    lines = [len(server.log_text().splitlines()) for server in (prefill, decode)]

    stranger = Stranger(ours, keys, others, seed=98)
    served = 0
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(stranger.attack, STRANGERS)
        while not attack.done():
            serving.assert_equal(work, concurrency=6)
            served += len(work)
        attack.result()
    assert stranger.connections == STRANGERS
    assert served
    serving.assert_equal(work, concurrency=6)

    words = useful(instance, ours)
    for (kind, name), answers in stranger.heard.items():
        for answer in answers:
            assert_says_nothing(kind, name, answer)
            assert not [word for word in words if word in answer], (kind, name, answer)
    # In each kind of port, and by each way of speaking.
    assert len(stranger.heard) == sum(len(sayings(kind, keys, others)) - 1 for kind in KINDS)

    def now() -> dict[int, Process]:
        return {one.pid: one for server in (prefill, decode) for one in of_group(server.pid)}

    def is_over() -> bool:
        after = now()
        return all(after[pid].descriptors <= one.descriptors + 8 for pid, one in before.items())

    until(is_over, "descriptors are given back")
    for pid, one in now().items():
        grown = one.rss_bytes - before[pid].rss_bytes
        assert grown < 150 * MIB, f"process {pid} has {grown / MIB:.0f} MiB more"
    for server, count in zip((prefill, decode), lines, strict=True):
        new = server.log_text().splitlines()[count:]
        about = [line for line in new if any(word in line for word in ABOUT_STRANGERS)]
        assert len(about) < 300, about[:5]


def test_a_recorded_request_to_the_registry_counts_once(serving: Serving, secret: Path) -> None:
    keys = Keys.from_secrets(read_secret_file(secret))
    recorded = proved_request(keys, "GET", "/v1/instances/default", os.urandom(16))
    statuses = []
    for _ in range(2):
        with socket.create_connection((HOST, serving.pair.prefill.bootstrap_port), WAIT_S) as sock:
            sock.sendall(recorded)
            statuses.append(sock.recv(12))
    assert statuses == [b"HTTP/1.1 200", b"HTTP/1.1 401"]
