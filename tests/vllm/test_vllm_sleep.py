# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33 asks a connector whether its server may sleep, before the server starts."""

from __future__ import annotations

import os
import subprocess

import pytest
from cpu_serving.servers import SHIM
from cpu_serving.vllm_servers import PYTHON, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

ASK = """
from sglang_mooncake.vllm.pd_connector import PDConnector
from sglang_mooncake.vllm.store_connector import StoreConnector
print([one.supports_sleep_mode(None) for one in (PDConnector, StoreConnector)])
"""


def test_no_connector_lets_its_server_sleep() -> None:
    done = subprocess.run(
        [PYTHON, "-c", ASK],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(SHIM)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.endswith("[False, False]\n"), done.stdout + done.stderr
