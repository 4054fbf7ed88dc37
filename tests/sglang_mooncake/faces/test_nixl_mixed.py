# SPDX-License-Identifier: Apache-2.0
"""An agent over te and one of NVIDIA's package: neither takes the other's metadata, and both say so
at once."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nixl_agents import agent, registered

from sglang_mooncake.faces.nixl.names import Mismatch

NVIDIAS = Path(__file__).resolve().parents[3] / "build/peers/nixl"
THEIRS = """
import base64, json, os, sys
from nixl._api import nixl_agent

one = nixl_agent("theirs")
try:
    one.add_remote_agent(base64.b64decode(sys.argv[1]))
    said = "taken"
except Exception as error:
    said = f"{type(error).__name__}: {error}"
told = base64.b64encode(one.get_agent_metadata()).decode()
known = one.check_remote_metadata("ours")
print(json.dumps({"said": said, "told": told, "known": known}), flush=True)
os._exit(0)  # UCX in NVIDIA's wheel ends a process that exits by SIGSEGV.
"""


@pytest.mark.slow
def test_neither_takes_the_others_metadata() -> None:
    assert NVIDIAS.is_dir(), "scripts/setup peer nixl installs it, as scripts/test does"
    one = agent("ours")
    registered(one, 4096)
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, base64.b64encode(one.get_agent_metadata()).decode()],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(NVIDIAS), "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert (theirs["said"], theirs["known"]) == ("nixlMismatchError: NIXL_ERR_MISMATCH", False)
    with pytest.raises(Mismatch, match="both sides need sglang-mooncake's nixl, or both NVIDIA's"):
        one.add_remote_agent(base64.b64decode(theirs["told"]))
    assert not one.check_remote_metadata("theirs")
