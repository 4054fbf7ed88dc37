# SPDX-License-Identifier: Apache-2.0
"""The pure parts of te bench: shapes, contents, figures, tables, bars."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from te_bench import pattern, tables
from te_bench.bars import BAR_CASES, BARS, judge
from te_bench.contenders import floor
from te_bench.contenders.base import Spent, time_calls
from te_bench.protocol import Channel, ChannelClosed, Reply, Request
from te_bench.report import CaseResult, Sample, VariantRun, as_json, figures, percentile
from te_bench.shapes import SHAPES, Shape, plan

# -- shapes and contents


def landed(shape: Shape, seed: int) -> tuple[object, np.ndarray]:
    """A plan, and a destination as a perfect contender leaves it after round ``seed``."""
    layout = plan(shape, 1)
    source = np.zeros(layout.memory_nbytes, np.uint8)
    pattern.fill(source, seed)
    memory = np.zeros(layout.memory_nbytes, np.uint8)
    for there, here in zip(layout.source, layout.destination, strict=True):
        begin, to = int(there) * layout.stride, int(here) * layout.stride
        memory[to : to + shape.nbytes] = source[begin : begin + shape.nbytes]
    return layout, memory


@pytest.mark.parametrize("nbytes", [1, 7, 8, 100, 4096])
def test_check_finds_every_single_wrong_byte(nbytes):
    layout, memory = landed(Shape("x", 20, nbytes), seed=3)
    assert pattern.check(layout, memory, 3).verified
    for block in (0, 7, 19):
        at = int(layout.destination[block]) * layout.stride + nbytes - 1
        memory[at] ^= 0x80
        assert pattern.check(layout, memory, 3).wrong_blocks == 1
        memory[at] ^= 0x80
    assert pattern.check(layout, memory, 3).verified


def test_check_finds_what_the_last_round_left_and_what_strayed():
    layout, memory = landed(Shape("x", 20, 64), seed=3)
    assert pattern.check(layout, memory, 4).wrong_blocks == 20
    unused = np.setdiff1d(np.arange(layout.slots), layout.destination)
    memory[int(unused[-1]) * layout.stride + 63] = 1
    landing = pattern.check(layout, memory, 3)
    assert (landing.wrong_blocks, landing.stray_slots, landing.verified) == (0, 1, False)


def test_check_finds_blocks_that_changed_places():
    layout, memory = landed(Shape("x", 20, 64), seed=3)
    slots = memory.reshape(layout.slots, layout.stride)
    first, second = (int(slot) for slot in layout.destination[:2])
    slots[[first, second]] = slots[[second, first]]
    assert pattern.check(layout, memory, 3).wrong_blocks == 2


def test_plans_are_scattered_and_the_same_in_every_process():
    one, other = plan(SHAPES["s2k"], 5), plan(SHAPES["s2k"], 5)
    assert np.array_equal(one.source, other.source)
    assert not np.array_equal(one.source, one.destination)
    assert not np.array_equal(one.source, plan(SHAPES["s2k"], 6).source)
    for slots in (one.source, one.destination):
        assert np.unique(slots).size == slots.size == 16_384
        assert int(slots.max()) < one.slots
    assert [len(piece) for piece in plan(SHAPES["thr8"], 1).pieces()] == [488] * 8


def test_shapes_scale_down_but_not_away():
    assert SHAPES["kv"].scaled(0.25).blocks == 976
    assert SHAPES["thr8"].scaled(1e-6).blocks == 8
    assert (SHAPES["big"].scaled(0.5).blocks, SHAPES["big"].scaled(0.5).nbytes) == (1, 128 << 20)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0, 1), "blocks=0"), ((1, 0), "nbytes=0"), ((2, 8, 3), "threads=3"), ((9999, 1 << 40), "GB")],
)
def test_impossible_shapes_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named if named != "GB" else "bytes are"):
        Shape("x", *arguments)


# -- figures


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=300), st.sampled_from([50, 99, 100]))
def test_percentile_is_a_value_that_enough_do_not_exceed(values, percent):
    assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")


def sample(elapsed_ns: int, ops_ns: list[int] | None = None, wrong: int = 0) -> Sample:
    return Sample(
        elapsed_ns=elapsed_ns,
        ops_ns=ops_ns or [elapsed_ns],
        submit_ns=[],
        late_ns=[],
        cpu_s=elapsed_ns / 1e9,
        wrong_blocks=wrong,
        stray_slots=0,
    )


def run(name: str, family: str, *elapsed_ns: int, wrong: int = 0) -> VariantRun:
    return VariantRun(name, family, samples=[sample(ns, wrong=wrong) for ns in elapsed_ns])


def case(*runs: VariantRun, shape: str = "kv", **changed: object) -> CaseResult:
    known = SHAPES[shape]
    fields = {
        "shape": shape,
        "blocks": known.blocks,
        "nbytes": known.nbytes,
        "threads": 1,
        "sync": known.sync,
        "transport": "tcp",
        "memory": "any",
        "busy": False,
        "rounds": 3,
        "seed": 1,
        "machine": {"cpu": "test"},
    }
    return CaseResult(runs=runs, **(fields | changed))


def test_figures_are_medians_over_rounds():
    found = figures(run("te", "te", 4000, 1000, 2000), nbytes=8000)
    assert (found.gb_per_s, found.best_gb_per_s) == (4.0, 8.0)
    assert (found.p50_us, found.p99_us) == (2.0, 4.0)
    assert found.cpu_s_per_gb == pytest.approx(0.25)
    assert found.verified is True


def test_percentiles_of_many_calls_are_medians_of_the_rounds_own():
    quick, slow = [10_000] * 200, [90_000] * 200
    noisy = VariantRun("te", "te", samples=[sample(1, ops) for ops in (quick, slow, quick)])
    assert figures(noisy, 1).p99_us == 10.0
    few = VariantRun("te", "te", samples=[sample(1, ops[:5]) for ops in (quick, slow, quick)])
    assert figures(few, 1).p99_us == 90.0


def test_the_best_variant_stands_for_its_family():
    result = case(
        run("te", "te", 100),
        run("mooncake", "mooncake", 350),
        run("mooncake-pool", "mooncake", 300),
        run("floor:mapped-1", "", 1),
        VariantRun("nixl", "nixl", "absent", "nixl cannot be imported"),
    )
    assert result.results()["mooncake"].name == "mooncake-pool"
    assert result.ratios() == {"mooncake": pytest.approx(3.0), "nixl": None}
    assert result.ok
    shown = json.loads(json.dumps(as_json(result)))
    assert set(shown["results"]) == {"te", "mooncake", "nixl"}
    assert shown["results"]["nixl"]["state"] == "absent"
    assert "floor:mapped-1" in shown["variants"]


def test_latency_is_compared_where_blocks_go_one_at_a_time():
    result = case(run("te", "te", 50), run("mooncake", "mooncake", 100), shape="lat")
    assert result.metric == "p50_us"
    assert result.ratios() == {"mooncake": 0.5}


def test_a_variant_that_damages_anything_is_never_hidden():
    quick_and_right = run("mooncake", "mooncake", 100)
    slow_and_wrong = run("mooncake-pool", "mooncake", 900, wrong=2)
    result = case(run("te", "te", 100), quick_and_right, slow_and_wrong)
    assert result.results()["mooncake"].verified is False
    assert result.results()["mooncake"].reason == "2 wrong blocks, 0 slots written by mistake"
    assert not result.ok
    assert not case(VariantRun("te", "te", "failed", "no")).ok


def test_damage_before_a_failure_counts_too():
    failed = run("nixl", "nixl", 100, wrong=1)
    failed.state, failed.reason = "failed", "gone"
    result = case(run("te", "te", 100), failed)
    assert result.results()["nixl"].verified is False
    assert not result.ok


# -- tables and bars


def test_tables_show_every_variant_and_the_bars():
    result = case(
        run("te", "te", 100),
        run("mooncake", "mooncake", 400),
        run("floor:tcp-1", "floor", 99),
        VariantRun("nixl", "nixl", "failed", "it ended with status 7"),
    )
    shown = tables.text(result)
    assert "mooncake *" in shown
    assert "nixl: it ended with status 7" in shown
    assert "bar: gb_per_s ≥ 3.5 × mooncake's: 4.00, reached" in shown
    assert "bar: gb_per_s ≥ 0.95 × floor's: 0.99, reached" in shown
    rows = [line for line in tables.markdown(result).splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert {row.count("|") for row in rows} == {9}


def test_a_bar_is_not_judged_on_a_smaller_shape_or_another_setting():
    assert not any(bar.concerns(case(run("te", "te", 1), blocks=976)) for bar in BARS)
    busy = case(run("te", "te", 1), run("floor:tcp-1", "floor", 1), busy=True)
    alone = case(run("te", "te", 1))
    assert [judge(bar, alone) for bar in BARS if bar.concerns(alone)] == [
        "bar: submit_us ≤ 200: not measured"
    ]
    assert [judge(bar, busy) for bar in BARS if bar.concerns(busy)] == [
        "bar: gb_per_s ≥ 0.9 × floor's: 1.00, reached"
    ]
    assert len(BAR_CASES) == 10


@pytest.mark.parametrize(
    ("transport", "memory", "sync", "names"),
    [
        ("tcp", "any", False, ["tcp-3"]),
        ("tcp", "any", True, ["tcp-1"]),
        ("samehost", "engine", False, ["mapped-1", "mapped-2"]),
        ("auto", "any", True, ["unix-1", "vmsplice-1", "vm_writev-1", "vm_readv-1"]),
    ],
)
def test_the_fitting_floors_do_the_same_work(transport, memory, sync, names):
    assert floor.fitting(transport, memory, rails=3, sync=sync) == names
    assert set(names) <= set(floor.all_floors(rails=3, sync=sync))


@pytest.mark.parametrize("name", ["", "tcp", "tcp-0", "tcp-65", "tcp-x", "rdma-1", "-1"])
def test_floors_that_do_not_exist_are_refused(name):
    with pytest.raises(ValueError, match="no floor"):
        floor.parse(name)


# -- the line protocol


def test_messages_survive_being_cut_anywhere():
    near, far = socket.socketpair()
    channel = Channel(far)
    line = b'{"ok":{"a":1}}\n{"failed":"no"}\n'
    for byte in line:
        near.sendall(bytes([byte]))
    assert channel.receive(Reply, 60.0).ok == {"a": 1}
    assert channel.receive(Reply, 60.0).failed == "no"
    with pytest.raises(TimeoutError):
        channel.receive(Reply, 0.02)
    near.close()
    with pytest.raises(ChannelClosed):
        channel.receive(Reply, 60.0)
    with pytest.raises(ChannelClosed):
        channel.send(Request(op="fill"))
    channel.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_time_between_an_outcome_and_its_waiter_is_told_apart(threads):
    hour = 3600 * 10**9  # Longer than any thread stands still.
    calls = [[lambda: Spent(5, hour), lambda: Spent(7, hour)]] * threads
    timing = time_calls(calls)
    assert max(timing.ops_ns) < 0  # a call that returned at once landed an hour before
    assert timing.elapsed_ns < 0
    assert sorted(timing.submit_ns) == [5] * threads + [7] * threads
    assert timing.late_ns == [hour] * 2 * threads
