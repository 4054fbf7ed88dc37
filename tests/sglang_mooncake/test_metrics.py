# SPDX-License-Identifier: Apache-2.0
"""Metrics follow from what is counted, and their labels stay few."""

from __future__ import annotations

import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_stats import ENGINE
from test_story import prefill

from bootstrap_server import Why
from sglang_mooncake.metrics import (
    METRICS,
    RANK_LABELS,
    Deltas,
    gauges,
    observations,
    totals,
)
from te.stats import FenceStats, Outcomes, RailFlow, TransportStats

BY_NAME = {one.name: one for one in METRICS}
COUNTED = {
    "ends": {"done": 5, "failed": 1},
    "bytes": 1000,
    "bytes_early": 300,
    "digests": {
        "cells": 9,
        "bytes": 90,
        "seconds": 0.5,
        "equal": 3,
        "different": 1,
        "not compared": 2,
    },
    "fallbacks": {"a reason": 2},
    "calls": {"send": (7, 0.5), "poll": (70, 0.25)},
}
TCP = TransportStats(
    bytes_sent=30,
    bytes_received=12,
    rails=(RailFlow(10, 5), RailFlow(20, 7)),
    outcomes=Outcomes(4, 40, 30, {"stalled": 2, "was_refused": 1}, 3, 6, 12),
    links_ended={"closed": 1},
    rails_lost=2,
    rails_remade=1,
)
STATS = replace(
    ENGINE,
    by_transport={"tcp": TCP},
    fences=FenceStats(9, 0.125, 1),
    connects=3,
    connects_fallen_back=2,
    registered_bytes={"host": 4096},
)


def test_names_are_those_that_prometheus_wants():
    assert len(BY_NAME) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", one.name)
        assert one.name.endswith("_total") == (one.kind == "counter")
        assert bool(one.buckets) == (one.kind == "histogram")
        assert list(one.buckets) == sorted(set(one.buckets))
        assert one.help.endswith(".")
        assert not set(one.labels) & set(RANK_LABELS)


def test_every_figure_is_in_the_table_with_its_labels():
    told = totals(STATS, COUNTED) | gauges(STATS, 4, []) | dict(observations(prefill()))
    for name, labels in told:
        assert len(labels) == len(BY_NAME[name].labels), name
    assert {name for name, _ in told} == set(BY_NAME), "every metric has a figure"


def test_figures_are_those_that_were_counted():
    told = totals(STATS, COUNTED)
    assert told["bytes_total", ("tcp", "1", "sent")] == 20
    assert told["bytes_total", ("tcp", "0", "received")] == 5
    assert sum(told["bytes_total", ("tcp", str(i), "sent")] for i in range(2)) == TCP.bytes_sent
    assert told["transfers_total", ("tcp", "failed")] == 3
    assert told["transfer_failures_total", ("tcp", "stalled")] == 2
    assert told["fences_total", ("timed out",)] == 1
    assert told["rooms_total", ("done",)] == 5
    assert told["scheduler_seconds_total", ("poll",)] == 0.25
    assert gauges(STATS, 4)["rooms_open", ()] == 4
    assert gauges(STATS, 4)["registered_bytes", ("host",)] == 4096


def test_what_an_alert_counts_is_there_before_the_first_event():
    quiet = replace(STATS, by_transport={}, transports=("tcp",))
    told = totals(quiet, COUNTED | {"ends": {}})
    for key in (
        ("rooms_total", ("failed",)),
        ("rooms_total", ("timed out",)),
        ("transfers_total", ("tcp", "failed")),
        ("transfer_failures_total", ("tcp", "stalled")),
        ("links_ended_total", ("tcp", "process_gone")),
        ("fences_total", ("timed out",)),
        ("connects_fallen_back_total", ()),
    ):
        assert key in told
    assert told["rooms_total", ("failed",)] == 0


def test_reasons_are_bounded_and_none_is_lost():
    many = COUNTED | {"fallbacks": {f"reason {i}": 1 for i in range(1000)}}
    told = {key: v for key, v in totals(STATS, many).items() if key[0] == "fallbacks_total"}
    assert len(told) == 33
    assert sum(told.values()) == 1000
    assert told["fallbacks_total", ("other",)] == 968


def test_a_hand_over_is_what_follows_the_last_send():
    story = prefill()
    told = dict(observations(story))
    stages = story.stages()
    assert told["handover_seconds", ()] == pytest.approx(
        stages["planned"] + stages["posted"] + stages["acknowledged"]
    )
    assert sum(v for (name, _), v in told.items() if name == "stage_seconds") == pytest.approx(
        story.duration_s
    )


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100)), max_size=20))
def test_deltas_add_up_to_what_has_risen(looks):
    deltas, told, rising = Deltas(), {}, {}
    for look in looks:
        for name, by in look.items():
            rising[name, ()] = rising.get((name, ()), 0) + by
        for key, risen in deltas.of(dict(rising)).items():
            assert risen >= 0
            told[key] = told.get(key, 0) + risen
        assert told == rising


def test_a_counter_that_begins_anew_counts_on():
    deltas = Deltas()
    assert deltas.of({("a", ()): 10}) == {("a", ()): 10}
    assert deltas.of({("a", ()): 10}) == {}
    assert deltas.of({("a", ()): 3}) == {("a", ()): 3}


def test_a_counter_that_another_rank_told_meanwhile_counts_on():
    deltas = Deltas()
    assert deltas.of({("a", ()): 10}) == {("a", ()): 10}
    assert deltas.of({}) == {}
    assert deltas.of({("a", ()): 12}) == {("a", ()): 2}


def test_counters_are_there_before_they_count():
    assert Deltas().of({("a", ()): 0}) == {("a", ()): 0}


def test_every_field_of_the_engines_figures_is_told_or_left_out_on_purpose():
    """A new figure of te should not be forgotten here."""
    told = {
        "by_transport", "fences", "connects", "connects_fallen_back", "peers", "rails",
        "registered_bytes",
    }  # fmt: skip
    sums_of_these = {
        "bytes_sent", "bytes_received", "transfers_done", "transfers_failed",
        "transfers_cancelled",
    }  # fmt: skip
    of_single_peers = {"transports", "peer_transports", "peer_bytes_per_s"}
    assert {one.name for one in fields(STATS)} == told | sums_of_these | of_single_peers


def test_each_reason_to_be_refused_has_a_series_from_the_start():
    assert not [key for key in gauges(STATS, 0) if key[0] == "refused_servers"], "of prefill"
    found = gauges(STATS, 0, [Why.SECRET, Why.SECRET])
    series = {labels: value for (name, labels), value in found.items() if name == "refused_servers"}
    assert series == {(why.value,): 2 * (why is Why.SECRET) for why in Why}
