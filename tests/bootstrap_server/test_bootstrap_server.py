# SPDX-License-Identifier: Apache-2.0
"""Where the server listens, how it ends, and the one in a process of its own."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests
from bootstrap_waits import WAIT_S, no_thread_left

import bootstrap_server
from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    NotReady,
    RankCoords,
    RankRecord,
    Topology,
    Unreachable,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_secret_file, write_secret_file

MakeRecord = Callable[..., RankRecord]

ONE = Topology(1, 1, 1, 1)
FIRST = RankCoords(0, 0, 0, 0)
PORT_FLAG = "--disaggregation-bootstrap-port"


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "localhost"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::", "[::]"),
    ],
)
def test_hosts_of_all_kinds(host: str, address: str) -> None:
    if ":" in host and not has_ipv6_loopback():
        with pytest.raises(BootstrapError, match="cannot listen"):
            BootstrapServer(host=host, port=0)
        return
    with (
        BootstrapServer(host=host, port=0) as server,
        BootstrapClient(f"{address}:{server.port}", WAIT_S) as client,
        pytest.raises(NotReady),
    ):
        client.instance()


def test_a_taken_port_is_one_clear_sentence(server: BootstrapServer) -> None:
    with pytest.raises(BootstrapError) as caught:
        BootstrapServer(host="127.0.0.1", port=server.port)
    taken = os.strerror(errno.EADDRINUSE)
    for words in ("127.0.0.1", f"port {server.port}", taken, PORT_FLAG):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 65_536, "outside 0..65535"),
        ("127.0.0.1", -1, "outside 0..65535"),
        ("", 0, "host is empty"),
        ("no.such.host.invalid", 0, "cannot resolve"),
        ("x" * 300, 0, "cannot resolve"),
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1"),
    ],
)
def test_places_where_nobody_can_listen(host: str, port: int, words: str) -> None:
    with pytest.raises(BootstrapError, match=words):
        BootstrapServer(host=host, port=port)


def test_close_frees_the_port_and_may_be_repeated(port: int) -> None:
    with no_thread_left("bootstrap-server"):
        server = BootstrapServer(host="127.0.0.1", port=port)
        with BootstrapClient(f"127.0.0.1:{port}", WAIT_S) as client:
            with pytest.raises(NotReady):
                client.instance()  # leaves an idle connection open
            server.close()
            server.close()
            with pytest.raises(Unreachable):
                client.instance()
    BootstrapServer(host="127.0.0.1", port=port).close()


@contextmanager
def standalone(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bootstrap_server", *arguments],
        cwd=Path(bootstrap_server.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_standalone_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with standalone("--host", "127.0.0.1", "--port", "0", "--log-level", "info") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("bootstrap server listens on 127.0.0.1 port ")
        address = f"127.0.0.1:{line.split()[-1]}"
        with BootstrapClient(address, WAIT_S) as client, pytest.raises(NotReady):
            client.instance()
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "")
        assert "Traceback" not in errors


@pytest.mark.slow
def test_standalone_refuses_leases_that_do_not_last() -> None:
    with standalone("--port", "0", "--lease-s", "0") as process:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (2, "")
        assert errors == "error: --lease-s='0': give seconds between 0.01 and 86400\n"


@pytest.mark.slow
def test_standalone_says_in_one_line_that_the_port_is_taken(server: BootstrapServer) -> None:
    with standalone("--port", str(server.port)) as process:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (1, "")
        assert errors.count("\n") == 1
        assert os.strerror(errno.EADDRINUSE) in errors


@pytest.mark.slow
def test_standalone_serves_those_who_have_the_secret(tmp_path: Path) -> None:
    write_secret_file(tmp_path / "secret")
    keys = Keys.from_secrets(read_secret_file(tmp_path / "secret")).registry
    with standalone("--port", "0", "--secret-file", str(tmp_path / "secret")) as process:
        assert process.stdout is not None
        address = f"127.0.0.1:{process.stdout.readline().split()[-1]}"
        with BootstrapClient(address, WAIT_S, keys=keys) as client, pytest.raises(NotReady):
            client.instance()
        with (
            BootstrapClient(address, WAIT_S) as client,
            pytest.raises(BootstrapError, match="serves only SGLang servers that have its secret"),
        ):
            client.instance()


@pytest.mark.slow
@pytest.mark.parametrize(("option", "status"), [([], 401), (["open"], 200), (["off"], 401)])
def test_standalone_shows_its_page_to_those_who_may_see_it(
    tmp_path: Path, option: list[str], status: int
) -> None:
    write_secret_file(tmp_path / "secret")
    options = ["--port", "0", "--secret-file", str(tmp_path / "secret")]
    if option:
        options += ["--status-page", *option]
    with standalone(*options) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().split()[-1]}/"
        # As a site whose name leads here: a page of the registry's own host does not show it that.
        answer = requests.get(url, headers={"Host": "a.site.example"}, timeout=60)
        assert answer.status_code == status


@pytest.mark.slow
def test_standalone_does_not_serve_without_the_secret_that_it_was_told_of(tmp_path: Path) -> None:
    absent = tmp_path / "secret"
    with standalone("--port", "0", "--secret-file", str(absent)) as process:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (1, "")
        assert errors == f"error: cannot read the secret from {absent}: {os.strerror(2)}\n"
