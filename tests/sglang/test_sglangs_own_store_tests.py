# SPDX-License-Identifier: Apache-2.0
"""SGLang's own tests of its HiCache backend `mooncake`, which come with it, over kvstore."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from store_host import store_directory

from sglang_mooncake.sglang.running import environment_for

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.by_turns,
    pytest.mark.timeout(600),
]

TESTS = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"


def test_they_pass() -> None:
    with store_directory() as directory:
        given = {
            "SGLANG_MOONCAKE_STORE": json.dumps({"directory": str(directory)}),
            "MOONCAKE_MASTER": "127.0.0.1:50051",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "67108864",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, "-m", TESTS],
            env=dict(environment_for(os.environ | given)),
            capture_output=True,
            text=True,
            timeout=500.0,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All tests passed" in done.stderr
    assert "mooncake.store is sglang-mooncake's store" in done.stderr
