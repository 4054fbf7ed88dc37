# SPDX-License-Identifier: Apache-2.0
"""scripts/route-bench for real: the smallest run that compares all ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

ROOT = Path(__file__).parents[2]
MODULES = f"{ROOT / 'scripts'}:{ROOT / 'tests/support'}:{ROOT}"
BOUND_S = 800.0
BLOCK, PAGE = 512, 16
TURNS = 6


def write_trace(path: Path) -> None:
    """Two conversations of three turns each, in turn; each turn has a block of its own more."""
    lines = [
        {
            "timestamp": 4000 * turn + 2000 * who,
            "input_length": BLOCK * (4 + turn),
            "output_length": 1,
            "hash_ids": [100 * who + n for n in range(4 + turn)],
        }
        for turn in range(TURNS // 2)
        for who in range(2)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_all_ways_give_the_same_tokens_and_are_measured(tmp_path: Path) -> None:
    trace, file = tmp_path / "turns.jsonl", tmp_path / "found.json"
    write_trace(trace)
    model = ("--layers", "3", "--hidden", "128", "--load", "0.1")
    servers = ("--prefill", "2", "--decode", "2")
    done = subprocess.run(
        [
            sys.executable, "-m", "route_bench", str(trace), "--requests", str(TURNS),
            "--rounds", "1", "--compared", str(TURNS), "--json", str(file), *model, *servers,
        ],
        env={**os.environ, "PYTHONPATH": MODULES},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "all tokens are equal" in done.stdout
    turns = {turn["way"]: turn for turn in json.loads(file.read_text())["turns"]}
    assert list(turns) == ["mini-lb", "cache_aware", "ours", "ours+store"]
    for turn in turns.values():
        assert [one["error"] for one in turn["samples"] if one["error"] or one["refused"]] == []
        assert turn["prompt_tokens"] == sum(32 * (4 + n // 2) for n in range(TURNS))
        assert 0 <= turn["hit_tokens"] <= turn["oracle_tokens"] == 2 * 32 * (4 + 5)
