# SPDX-License-Identifier: Apache-2.0
"""A small share of what `handover_chaos.py` runs for minutes: no false alarm, no wrong byte."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
from handover_chaos import Counts, Traffic, Wrong, era

from sglang_mooncake import landed_digests
from sglang_mooncake.layout import Difference

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "transport"),
    [("tp2-tp4", "tcp"), ("state-tp2-tp1", "samehost"), ("mla-tp1-tp2", "samehost")],
)
def test_digests_of_requests_in_any_order_give_no_false_alarm(shape, transport):
    counts = Counts()
    era(shape, transport, 15, 7, counts)
    assert counts.equal >= counts.arrived > 0
    assert counts.aborted
    assert counts.retried
    assert counts.by_layers
    assert counts.behind_events


def test_a_false_alarm_would_end_the_run(monkeypatch):
    nth: Iterator[int] = count(1)
    compare = landed_digests.differences

    def alarmed(*of):
        return [Difference("page", 0, (0,), ("k of layer 0",))] if next(nth) == 3 else compare(*of)

    monkeypatch.setattr(landed_digests, "differences", alarmed)
    # By the request that fails; by the ranks' counts, if its client has left meanwhile.
    told = "is not the one that was sent: page 0 in k of layer 0|a false alarm"
    with pytest.raises(Wrong, match=told):
        era("tp1-tp1", "tcp", 10, 7, Counts())


def test_a_wrong_byte_would_end_the_run(monkeypatch):
    """Pages that nothing has filled have equal digests on both sides."""
    monkeypatch.setattr(Traffic, "_fill", lambda *args: None)
    with pytest.raises(Wrong, match="wrong pages of room"):
        era("tp1-tp1", "tcp", 10, 7, Counts())
