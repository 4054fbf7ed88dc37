# SPDX-License-Identifier: Apache-2.0
"""scripts/ttft: what is asked for, what follows from what was measured, tables and plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cpu_serving.model import LlamaSize, make_llama
from ttft_bench.options import parse
from ttft_bench.plot import svg
from ttft_bench.rates import EVEN, UNLIMITED, parse_rate
from ttft_bench.results import (
    KINDS,
    Carried,
    Kind,
    Point,
    Sample,
    differences,
    forward_ratio,
    judge,
)
from ttft_bench.tables import as_json, text

MB = 1e6


def point(
    *,
    ttft_s: dict[Kind, float],
    transfer_s: float,
    early: float = 0.875,
    forward_s: float = 1.0,
    forward_by_layers_s: float = 1.0,
) -> Point:
    """Two rounds, of which the second takes 1 ms longer; 100 MB a request."""
    nbytes = 100 * MB
    samples = tuple(
        Sample(
            kind,
            number,
            seconds + number / 1000,
            forward_by_layers_s if kind == "layers" else forward_s,
            (7, 8),
        )
        for number in range(2)
        for kind, seconds in ttft_s.items()
    )
    carried: dict[Kind, Carried] = {
        "pd": Carried(nbytes, 0, transfer_s, 0.0, {}),
        "layers": Carried(nbytes, early * nbytes, 0.1, 0.0002, {}),
    }
    rate = nbytes / transfer_s
    return Point("1:1", rate * 8, rate, 1024, 16, samples, carried)


EVEN_POINT = point(ttft_s={"one": 1.0, "pd": 2.0, "layers": 1.2}, transfer_s=1.0)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("50mbit", 50e6), ("1gbit", 1e9), ("1.5gbit", 1.5e9), ("2500kbit", 2.5e6)],
)
def test_rates_are_read_as_tc_reads_them(text: str, bits_per_s: float) -> None:
    rate = parse_rate(text)
    assert (rate.text, rate.bits_per_s) == (text, bits_per_s)


def test_rates_with_a_name() -> None:
    assert parse_rate("unlimited") == UNLIMITED
    assert parse_rate("1:1") == EVEN


@pytest.mark.parametrize("wrong", ["", "200", "200 mbit", "-1mbit", "fast", "1mbps", "2:1"])
def test_what_is_no_rate_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="is no rate: give 200mbit"):
        parse_rate(wrong)


@pytest.mark.parametrize("extreme", ["1kbit", "200gbit"])
def test_rates_that_nothing_can_be_measured_at_are_refused(extreme: str) -> None:
    with pytest.raises(ValueError, match="between 1mbit and 100gbit"):
        parse_rate(extreme)


def test_the_command_of_the_readme() -> None:
    options = parse(["--rate", "200mbit,1:1", "--prompt", "4096,1024,4096"])
    assert options.prompts == (1024, 4096)
    assert [rate.text for rate in options.rates] == ["200mbit", "1:1"]
    assert options.kinds == KINDS
    assert options.model.positions > 4096


def test_kinds_keep_their_order() -> None:
    assert parse(["--kinds", "pd,one"]).kinds == ("one", "pd")


def test_bound_sum_and_what_is_hidden() -> None:
    found = point(ttft_s={"one": 1.0, "pd": 1.6, "layers": 1.15}, transfer_s=0.5)
    assert found.compute_s == pytest.approx(1.0005)
    assert found.bound_s == found.compute_s
    assert found.sum_s == pytest.approx(1.5005)
    assert found.last_group_s == pytest.approx(0.0625)
    assert found.hidden == pytest.approx((1.5005 - 1.1505) / 0.5)
    assert found.gain == pytest.approx(1 - 1.1505 / 1.6005)
    assert found.spread_s("pd") == (1.6, 1.601)
    slow = point(ttft_s={"one": 1.0, "pd": 3.0, "layers": 2.1}, transfer_s=2.0)
    assert slow.bound_s == 2.0


def test_bars_at_one_to_one() -> None:
    bars = judge([EVEN_POINT], KINDS)
    assert [bar.met for bar in bars] == [True, True, True]
    assert "1.10 × max(1000, 1000) + 125" in str(bars[0])
    assert str(bars[0]).startswith("met: 1024 tokens at 1:1")
    assert "40.0%" in str(bars[1])


def test_bars_that_are_missed() -> None:
    late = point(
        ttft_s={"one": 1.0, "pd": 2.0, "layers": 1.4}, transfer_s=1.0, forward_by_layers_s=1.02
    )
    bars = judge([late], KINDS)
    assert [bar.met for bar in bars] == [False, False, False]
    assert all(str(bar).startswith("MISSED: ") for bar in bars)


def test_bytes_that_were_late_are_no_excuse_but_for_the_last_group() -> None:
    found = point(ttft_s={"one": 1.0, "pd": 2.0, "layers": 1.4}, transfer_s=1.0, early=0.5)
    assert judge([found], KINDS)[0].met, "half of the bytes took half a second after the forward"
    assert judge([replace(found, bytes_per_s=found.bytes_per_s * 2)], KINDS)[0].met is False


def test_the_last_layer_is_computed_before_it_leaves() -> None:
    all_early = point(ttft_s={"one": 1.0, "pd": 2.0, "layers": 1.15}, transfer_s=0.8, early=1.0)
    assert all_early.last_group_s == pytest.approx(0.8 / 16)
    assert judge([all_early], KINDS)[0].met


def test_a_slow_network_has_no_bar_of_its_own() -> None:
    slow = point(ttft_s={"one": 1.0, "pd": 3.0, "layers": 2.9}, transfer_s=2.0)
    judged = [bar for bar in judge([slow], KINDS) if bar.met is not None]
    assert len(judged) == 1, "that of the forward time"
    assert "--rate 1:1" in str(judge([slow], KINDS)[0])


def test_without_all_kinds_nothing_is_judged() -> None:
    (bar,) = judge([EVEN_POINT], ["one", "pd"])
    assert str(bar).startswith("not judged: ")


def test_forward_times_are_compared_round_by_round() -> None:
    drifting = point(ttft_s={"pd": 2.0, "layers": 1.2}, transfer_s=1.0)
    samples = tuple(replace(s, forward_s=s.forward_s * (1 + s.round)) for s in drifting.samples)
    assert forward_ratio([replace(drifting, samples=samples)]) == 1.0
    assert forward_ratio([replace(drifting, samples=())]) is None


def test_tokens_that_differ_are_named() -> None:
    assert differences([EVEN_POINT]) == []
    wrong = tuple(
        replace(s, output_ids=(7, 9)) if (s.kind, s.round) == ("layers", 1) else s
        for s in EVEN_POINT.samples
    )
    (sentence,) = differences([replace(EVEN_POINT, samples=wrong)])
    assert "1024 tokens, 1:1, round 1" in sentence
    assert "pd [7, 8]" in sentence
    assert "layers [7, 9]" in sentence


@pytest.mark.parametrize("kinds", [KINDS, ("one", "pd"), ("pd", "layers"), ("one",)])
def test_tables_json_and_plot_of_any_kinds(kinds: tuple[Kind, ...]) -> None:
    points = [
        replace(
            found,
            samples=tuple(s for s in found.samples if s.kind in kinds),
            carried={kind: one for kind, one in found.carried.items() if kind in kinds},
        )
        for found in (EVEN_POINT, replace(EVEN_POINT, prompt_tokens=4096, rate="unlimited"))
    ]
    lines = text(points, kinds).splitlines()
    assert len(lines) == 14
    assert lines[2].split()[:2] == ["1024", "1:1"]
    document = as_json(points, kinds, judge(points, kinds), {"at": "now"})
    assert json.loads(json.dumps(document))["points"][1]["prompt_tokens"] == 4096
    drawn = ElementTree.fromstring(svg(points, kinds))
    circles = drawn.iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == 2 * len(kinds)


def test_a_model_of_any_size(tmp_path: Path) -> None:
    size = LlamaSize(layers=2, hidden=32, intermediate=48, heads=2, head_dim=16, positions=100)
    assert size.kv_bytes_per_token == 2 * 2 * 32 * 4
    made = make_llama(size, tmp_path)
    config = json.loads((made / "config.json").read_text())
    assert (config["num_hidden_layers"], config["max_position_embeddings"]) == (2, 100)
    assert make_llama(size, tmp_path) == made
    assert make_llama(replace(size, layers=1), tmp_path) != made
