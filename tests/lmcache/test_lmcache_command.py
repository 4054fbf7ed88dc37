# SPDX-License-Identifier: Apache-2.0
"""The commands of docs/kvstore.md: LMCache's own bench verifies the store, its server knows it."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from docs_commands import commands
from lmcache.cli.commands import register_commands
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

from kvstore.lmcache.adapter import StoreL2AdapterConfig

TIMEOUT_S = 300
LMCACHE = {one.words[1]: one.words[1:] for one in commands() if one.words[0] == "lmcache"}


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """By LMCache's own parser."""
    parser = argparse.ArgumentParser()
    register_commands(parser.add_subparsers(), list(words))
    return parser.parse_args(list(words))


@pytest.mark.filterwarnings("ignore")  # LMCache imports its own commands
@pytest.mark.parametrize("name", ["server", "bench"])
def test_lmcache_understands_the_command(name: str) -> None:
    (plugin,) = parse_args_to_l2_adapters_config(parsed(LMCACHE[name])).adapters
    assert plugin.module_path == "kvstore.lmcache.adapter"
    assert StoreL2AdapterConfig.from_dict(plugin.adapter_params).store.memory > 0


@pytest.mark.timeout(2 * TIMEOUT_S)
def test_lmcaches_bench_verifies_the_store(directory: Path) -> None:
    """As it stands in the docs, with sockets in a directory of this test, and deadlines that a busy
    machine does not miss."""
    *words, plugin = LMCACHE["bench"]
    settings = json.loads(plugin)
    late = {"timeout_s": 60.0, "request_timeout_s": 60.0}
    settings["adapter_params"] |= {"directory": str(directory / "s"), **late}
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", *words, json.dumps(settings)],
        env=os.environ | quiet | {"XDG_RUNTIME_DIR": str(directory)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        process_group=0,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "[Verify] All 32 keys data verified OK." in said, said
    for operation, verb in (("Store", "success_keys"), ("Lookup", "found"), ("Load", "loaded")):
        rounds = re.findall(rf"\[{operation}\] Round \d+: [\d.]+ ms, {verb}=(\S+)", said)
        assert rounds == ["32/32"] * 6, said
    assert "failed" not in said, said
