# SPDX-License-Identifier: Apache-2.0
"""A server loads from an owner while that is faster than to compute, and only then: the owner is
behind a network that becomes slow, and fast again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import slow_owner
from slow_owner import PAGE, PROMPT, REQUESTS

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900), pytest.mark.by_turns]

ROOT = Path(__file__).parents[2]
BOUND_S = 800.0
ALL = [(PROMPT - 1) // PAGE * PAGE] * REQUESTS


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    paths = [
        ROOT / "scripts",
        ROOT / "tests/support",
        ROOT / "tests/serving",
        ROOT / "tests/kvstore",
    ]
    done = subprocess.run(
        [sys.executable, slow_owner.__file__, str(tmp_path_factory.mktemp("admission"))],
        env=os.environ | {"PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
        process_group=0,
    )
    if done.returncode == slow_owner.EXIT_NO_NAMESPACES:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_tokens_are_equal_whatever_is_loaded(rounds: list[dict[str, Any]]) -> None:
    for one in rounds:
        assert one["errors"] == []
        assert one["output_ids"] == rounds[0]["output_ids"], one["title"]


def test_a_fast_owner_is_loaded_from_and_a_slow_one_is_not(rounds: list[dict[str, Any]]) -> None:
    computed, fast, slow, still = rounds[:4]
    assert computed["cached"] == [0] * REQUESTS
    assert fast["cached"] == ALL
    assert fast["admission"]["declined"] == 0
    assert 0 in slow["cached"], "after some loads that were slow the rest is computed"
    # Probes load some pages. One that meets an idle network's burst may make the next load seem
    # worth it, once.
    assert sum(still["cached"]) <= sum(ALL) / 2
    assert still["admission"]["declined"] > fast["admission"]["declined"]
    assert still["admission"]["unpaid"] > 0, "the loads that showed it have not paid"
    # As the host's owner has measured it, which brings what the server wants a second time.
    assert 0 < slow["bytes_per_s"][0] < rounds[-1]["bytes_per_s"][0] / 4


def test_an_owner_that_is_fast_again_is_found_out(rounds: list[dict[str, Any]]) -> None:
    assert rounds[-1]["title"] == "fast again"
    assert rounds[-1]["cached"] == ALL
    assert rounds[-1]["admission"]["probes"] > 0
