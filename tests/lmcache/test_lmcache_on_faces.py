# SPDX-License-Identifier: Apache-2.0
"""LMCache's transfer channels of NIXL and of Mooncake's engine, and its connector of Mooncake's
store, unmodified, over te and kvstore."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cpu_serving.ports import PortBlock

from sglang_mooncake.sglang.running import environment_for

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pages_and_objects_come_as_they_are(directory: Path, tmp_path: Path) -> None:
    # LMCache imports its backend of GPUDirect Storage with all others, and that one a package that
    # is not installed here.
    (tmp_path / "aiofile.py").touch()
    given = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))),
        "SGLANG_MOONCAKE_HOST": "127.0.0.1",
        "SGLANG_MOONCAKE_STORE": json.dumps({"directory": str(directory / "kvstore")}),
        "LMCACHE_TRACK_USAGE": "false",
    }
    program = str(Path(__file__).with_name("lmcache_on_faces.py"))
    with PortBlock() as ports:
        done = subprocess.run(
            [sys.executable, program, str(ports.first)],
            env=dict(environment_for(given)),
            capture_output=True,
            text=True,
            timeout=110.0,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "nixl": [True] * 3,
        "mooncake_te": [True] * 3,
        "zero copy": [True] * 4,
        "with metadata": [True] * 4,
    }
    assert "mooncake.engine and nixl are te, and mooncake.store is kvstore" in done.stderr
