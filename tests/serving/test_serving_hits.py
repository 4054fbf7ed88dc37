# SPDX-License-Identifier: Apache-2.0
"""scripts/demo --store-hits for real: its smallest run."""

from __future__ import annotations

import json

import pytest
from cpu_serving import hits_demo
from cpu_serving.nursery import Nursery

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600), pytest.mark.by_turns]


def test_all_of_a_second_round_comes_from_the_store(
    nursery: Nursery, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--requests=4", "--prompt=200", "--new-tokens=3", "--layers=2", "--hidden=128"]
    status = hits_demo.main([*size, "--rounds=1", "--json"], nursery)
    assert status == 0, "the tokens are equal, and found"
    *shown, last = capsys.readouterr().out.splitlines()
    assert shown[1].startswith("TTFT, mean")
    found = json.loads(last)
    assert len(found["cold"]) == len(found["hit"]) == 1
    assert min(found["hit"][0].values()) > 0
