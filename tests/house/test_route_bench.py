# SPDX-License-Identifier: Apache-2.0
"""scripts/route-bench: what is asked for, loads made of traces, what is told of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from route_bench.command import kept_traces
from route_bench.load import oracle_hits, sampled, scaled
from route_bench.options import WAYS, Way, parse
from route_bench.results import Sample, Turn, bars, differences, table

from kvstore_tools.traces import Request, read_trace

PAGE = 4


def request(at: int, tokens: int, *blocks: int) -> Request:
    return Request(timestamp=at, input_length=tokens, output_length=1, hash_ids=list(blocks))


def test_whole_families_are_taken_in_the_order_of_the_trace() -> None:
    # Block 0 is common to all: it makes no family.
    trace = [request(n, 1024, 0, 1 + n % 100, 1000 + n) for n in range(400)]
    taken = sampled(trace, 12, seed=3)
    assert len(taken) == 12
    assert [one.timestamp for one in taken] == sorted(one.timestamp for one in taken)
    families = {one.hash_ids[1] for one in taken}
    assert len(families) == 3, "four requests each"
    assert sampled(trace, 12, seed=4) != taken
    assert len(sampled(trace, 1000, seed=3)) == 400
    assert sampled([request(0, 0), request(1, 0)], 5, seed=1) == [request(0, 0), request(1, 0)]


def test_prompts_share_what_the_trace_shares_and_nothing_with_another_round() -> None:
    trace = [request(0, 1000, 1, 2), request(10, 1100, 1, 3, 4), request(40, 0)]
    load = scaled(trace, 32, 60, [7, 0])
    assert load.at == (0.0, 0.25, 1.0)
    first, second, empty = load.prompts
    assert (len(first), len(second), len(empty)) == (60, 60, 1)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]
    assert load.tokens == 121
    assert scaled(trace, 32, 60, [7, 0]) == load
    assert scaled(trace, 32, 60, [7, 1]).prompts[0][:16] != first[:16]
    assert scaled([trace[0]], 32, 60, [7, 0]).at == (0.0,)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), max_size=8))
def test_the_oracle_has_the_longest_beginning_in_common_with_one_before(
    prompts: list[list[int]],
) -> None:
    for number, found in enumerate(oracle_hits(prompts, PAGE)):
        prompt = prompts[number]
        common = [
            max(n for n in range(len(prompt) + 1) if prompt[:n] == earlier[:n])
            for earlier in prompts[:number]
        ]
        whole = min(max(common, default=0), len(prompt) - 1)
        assert found == whole // PAGE * PAGE


def turn(way: Way, *ttft_s: float, round: int = 0, hits: int = 97, **more: object) -> Turn:  # noqa: A002
    samples = tuple(Sample(one, (7, 8)) for one in ttft_s)
    return Turn("talk", way, round, samples, 200, hits, 100, **more)  # type: ignore[arg-type]


def test_bars_are_told_with_their_values() -> None:
    turns = [
        turn("mini-lb", *[1.0] * 50),
        turn("ours", *[0.5] * 50, errors=(0.9,)),
        turn("ours", *[0.7] * 50, round=1, hits=96, errors=(0.1, 0.2)),
    ]
    ttft, hits, error = bars(turns)
    assert (str(ttft), ttft.holds) == (
        "holds  talk, mean TTFT, ours in times mini-lb's: 0.600 (at most 0.6)",
        True,
    )
    assert (str(hits), hits.holds) == (
        "MISSED talk, hits, ours of the oracle's: 0.965 (at least 0.97)",
        False,
    )
    assert error.value == pytest.approx(0.15), (
        "what it expects by now, and not what it did at first"
    )
    turns[1] = turn("ours", *[0.5] * 50)
    assert len(bars(turns[:2])) == 2, "the router has not learnt yet"


def test_failures_and_refusals_are_counted_and_not_averaged() -> None:
    samples = (Sample(0.1, (1,)), Sample(None, refused=True), Sample(None, error="gone"))
    line = table([Turn("talk", "cache_aware", 0, samples, 0, 0, 0)]).splitlines()[1]
    assert line.split()[:4] == ["talk", "cache_aware", "100", "ms"]
    assert line.split()[-2:] == ["1", "1"]


def test_other_tokens_than_one_servers_or_than_another_ways_are_told() -> None:
    turns = [turn("mini-lb", 0.1, 0.1), turn("ours", 0.1, 0.1), turn("ours", 0.1, round=1)]
    assert differences(turns, {"talk": [(7, 8)]}) == []
    (one, two) = differences(turns, {"talk": [(7, 9)]})
    assert "round 0, request 0, mini-lb: tokens (7, 8) instead of (7, 9)" in one
    assert "ours" in two
    other = Turn("talk", "cache_aware", 1, (Sample(0.1, (9,)),), 1, 0, 0)
    assert len(differences([*turns, other], {})) == 1


def test_the_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "a.jsonl"
    trace.write_text("")
    assert parse([str(trace)]).ways == WAYS
    assert parse([str(trace), "--ways", "ours,mini-lb"]).ways == ("mini-lb", "ours")


def test_without_a_trace_there_are_those_of_the_repository(tmp_path: Path) -> None:
    assert parse([]).traces == ()
    traces = {path.name: len(read_trace(path)) for path in kept_traces(tmp_path)}
    assert traces == {"conversation_trace.jsonl": 12_031, "synthetic_trace.jsonl": 3_993}
