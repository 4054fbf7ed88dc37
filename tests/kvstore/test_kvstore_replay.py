# SPDX-License-Identifier: Apache-2.0
"""Hit ratios of the published traces, by policy and capacity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_traces import lines

from kvstore.cli import main
from kvstore_tools.replay import CAPACITIES, replay
from kvstore_tools.traces import Request, read_trace

#: What another simulator found, for the capacities of `CAPACITIES`.
KNOWN = {
    ("conversation", "lru"): [0.0445, 0.0650, 0.1355, 0.2112, 0.2875, 0.3546, 0.3635],
    ("conversation", "arc"): [0.0529, 0.0869, 0.1486, 0.2246, 0.2892, 0.3433, 0.3631],
    ("synthetic", "lru"): [0.0825, 0.1878, 0.3094, 0.4235, 0.5715, 0.6396, 0.6396],
    ("synthetic", "arc"): [0.0909, 0.1965, 0.3155, 0.4315, 0.5930, 0.6396, 0.6396],
}
IDEAL = {"conversation": (12_031, 288_500, 0.3664), "synthetic": (3_993, 121_877, 0.6396)}


@pytest.fixture(scope="module", params=sorted(IDEAL))
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / f"{request.param}.jsonl"
    path.write_text(lines(request.param))
    return path


@pytest.mark.slow
def test_the_published_traces_have_the_known_hit_ratios(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LRU has one meaning. ARC here evicts before it hears which block comes, as an owner does that
    makes room in the background, so that it adapts one block later."""
    assert main(["replay", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for policy, tolerance in (("lru", 0.00005), ("arc", 0.007)):
        ratios = [one["ratio"] for one in found if one["policy"] == policy]
        assert ratios == pytest.approx(KNOWN[trace.stem, policy], abs=tolerance)
    requests = read_trace(trace)
    count, blocks, ideal = IDEAL[trace.stem]
    unlimited = replay(requests, "lru", 1 << 62)
    assert (len(requests), unlimited.blocks) == (count, blocks)
    assert unlimited.ratio == pytest.approx(ideal, abs=0.00005)


@pytest.mark.slow
def test_arc_is_the_better_default_where_memory_is_scarce(trace: Path) -> None:
    requests = read_trace(trace)
    for capacity in CAPACITIES[:3]:
        assert replay(requests, "arc", capacity).ratio > replay(requests, "lru", capacity).ratio


def test_only_an_unbroken_run_from_the_begin_counts() -> None:
    first, second = Request(0, 9, 1, [1, 2, 3, 4]), Request(0, 9, 1, [1, 2, 9, 4])
    found = replay([first, second], "lru", 100)
    assert (found.blocks, found.hit_blocks) == (8, 2)
    assert replay([first, first], "lru", 3).hit_blocks == 0, "LRU loses a loop that is too long"


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}\n\n' * 2
    )
    assert main(["replay", str(path), "--policy", "lru", "--capacity", "1,2000"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["Mtokens", "0.000512", "1.02"],
        ["lru", "0.0000", "0.5000"],
        ["without", "a", "limit:", "0.5000", "of", "4", "blocks"],
    ]


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("", [], "has no requests"),
        ('{"timestamp": 0}\n', [], "line 1: Object missing required field `input_length`"),
        ("\n[]\n", [], "line 2: Expected `object`, got `array`"),
        ("x", ["--policy", "lru,fifo"], "--policy: ['fifo'] are none of arc, lru"),
        ("x", ["--capacity", "10,0"], "--capacity 10,0: give positive whole numbers of blocks"),
    ],
)
def test_bad_traces_and_options_are_a_sentence(
    content: str,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    assert main(["replay", str(path), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "none")]) == 2
