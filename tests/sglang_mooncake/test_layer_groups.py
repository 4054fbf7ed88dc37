# SPDX-License-Identifier: Apache-2.0
"""Into which groups of layers a forward's KV is cut."""

from __future__ import annotations

import random

import pytest

from sglang_mooncake.layer_groups import GROUPS_MAX, HAND_OVER_S, WORTH_S, ForwardPace, borders


def test_borders_rise_leave_something_and_are_few():
    """Of a thousand forwards of all sizes."""
    chosen = random.Random(14)
    cut = 0
    for _ in range(1000):
        layers = chosen.randrange(0, 130)
        got = borders(
            layers,
            chosen.choice([0, 1, 1 << chosen.randrange(28)]),
            chosen.choice([0.0, 10.0 ** chosen.uniform(3, 11)]),
            chosen.choice([0.0, 10.0 ** chosen.uniform(-5, 2)]),
            chosen.choice([0.0, 10.0 ** chosen.uniform(-7, -1)]),
        )
        cut += bool(got)
        assert list(got) == sorted(set(got))
        assert all(0 < border < layers for border in got)
        assert len(got) < GROUPS_MAX
    assert cut > 100


@pytest.mark.parametrize("layers", [2, 3, 16, 28, 61, 80])
def test_the_last_group_is_the_smallest_since_it_alone_is_sent_after_the_forward(layers):
    got = borders(layers, 1 << 20, 1e9, 10.0, 50e-6)
    sizes = [b - a for a, b in zip((0, *got), (*got, layers), strict=True)]
    assert sum(sizes) == layers
    assert sizes[-1] == min(sizes)
    assert sizes[-1] <= max(1, layers / 16)


@pytest.mark.parametrize(
    "forward",
    [
        (1, 1 << 20, 1e9, 1.0, 50e-6),
        (32, 0, 1e9, 1.0, 50e-6),
        (32, 1 << 20, 1e9, WORTH_S / 2, 50e-6),
        (32, 1000, 1e9, 1.0, 50e-6),
        (32, 1 << 20, 1e9, 0.02, 1e-3),
    ],
    ids=["one layer", "no bytes", "a short forward", "sent in no time", "dear hand-overs"],
)
def test_where_nothing_is_gained_there_are_no_groups(forward):
    assert borders(*forward) == ()


def test_before_a_rate_is_known_groups_are_made():
    assert borders(32, 1000, 0.0, 1.0, 50e-6)


def test_hand_overs_take_a_hundredth_of_a_forward_at_most():
    for forward_s in (0.01, 0.02, 0.05, 0.1):
        hand_overs = len(borders(64, 1 << 20, 1e9, forward_s, 50e-6)) + 1
        assert hand_overs * 50e-6 <= 0.01 * forward_s + 50e-6


def test_a_servers_first_slow_forwards_of_few_tokens_are_soon_forgotten():
    pace = ForwardPace()
    assert pace.forward_s(1000) == 0.0
    pace.forward_took(0.2, 4)
    pace.forward_took(0.3, 2048)
    assert 0.3 < pace.forward_s(2048) < 0.5
    for _ in range(20):
        pace.forward_took(0.3, 2048)
    assert pace.forward_s(1024) == pytest.approx(0.15, rel=0.01)


def test_a_lost_core_does_not_make_hand_overs_dear():
    pace = ForwardPace()
    for _ in range(20):
        pace.hand_over_took(20e-6)
    pace.hand_over_took(5e-3)
    assert pace.hand_over_s < 50e-6


def test_hand_overs_that_were_dear_once_are_tried_again():
    """A forward whose hand-overs lost their core must not turn the feature off for good."""
    pace, forward = ForwardPace(), (32, 1 << 20, 1e9, 0.02)
    for _ in range(20):
        pace.hand_over_took(5e-3)
    assert borders(*forward, pace.hand_over_s) == ()
    forwards = 0
    while not borders(*forward, pace.hand_over_s):
        pace.nothing_went()
        forwards += 1
    assert 3 < forwards < 100
    for _ in range(100):
        pace.nothing_went()
    assert pace.hand_over_s == HAND_OVER_S


def test_what_is_known_to_be_cheap_stays_so():
    pace = ForwardPace()
    for _ in range(20):
        pace.hand_over_took(20e-6)
    pace.nothing_went()
    assert pace.hand_over_s < 21e-6
