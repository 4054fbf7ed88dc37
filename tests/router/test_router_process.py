# SPDX-License-Identifier: Apache-2.0
"""The command `sglang-mooncake router` as a process."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from sglang_mooncake.sglang.cli import main

NOBODY = ("--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2")
BOUND_S = 60.0


def start(host: str, *words: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "sglang_mooncake.sglang.cli", "router", "--host", host]
    return subprocess.Popen([*argv, *words], stderr=subprocess.PIPE, text=True)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=BOUND_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_router_without_servers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--decode", "http://a:1"]) == 2
    assert "sglang-mooncake router: --prefill is missing" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_it_serves_until_it_is_told_to_end(host: str, named: str) -> None:
    with start(host, "--port", "0", "--cache-threshold", "0.5", *NOBODY) as router:
        assert router.stderr is not None
        said = ""
        while (found := re.search(rf"listens on {re.escape(host)} port (\d+)", said)) is None:
            said += router.stderr.readline()
            assert router.poll() is None, said
        assert "--cache-threshold changes nothing in this router" in said
        url = f"http://{named}:{found[1]}"
        assert status(f"{url}/health") == 200
        deadline_s = time.monotonic() + BOUND_S
        while status(f"{url}/readiness") == 200:  # Nobody is there, as it soon finds out.
            assert time.monotonic() < deadline_s
        with start(host, "--port", found[1], *NOBODY) as other:
            _, error = other.communicate(timeout=BOUND_S)
            assert other.returncode == 1
            assert f"cannot listen on {host} port {found[1]} (--host, --port)" in error
        router.send_signal(signal.SIGTERM)
        router.communicate(timeout=BOUND_S)
        assert router.returncode == 0
