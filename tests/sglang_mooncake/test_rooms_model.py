# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of a room on both sides of a link that delays, reorders, repeats and loses:
nothing is done with a page missing, nothing is released while it can be written or is read, and
every room ends once the events stop."""

from __future__ import annotations

import logging

import pytest
from rooms_model import FAULTS, Found, Model

from sglang_mooncake.rooms import prefill, prefill_room


@pytest.fixture(autouse=True)
def no_log(caplog):
    """What an executor says of bugs, it would say of each state in which they show."""
    caplog.set_level(logging.CRITICAL, "sglang_mooncake")


def assert_sound(found: Found, states: int, sources: int) -> None:
    """Nothing is wrong, and the model has not shrunk to one in which little happens."""
    assert found.problems == {}
    assert found.states > states
    assert found.ends["done", "/".join(["done"] * sources)]
    assert {"done", "failed", "aborted"} <= {end for end, _ in found.ends}
    assert {"done", "failed", "aborted"} <= {
        end for _, ends in found.ends for end in ends.split("/")
    }


@pytest.mark.slow
def test_one_prefill_rank_and_any_three_faults():
    assert_sound(Model(sources=1, faults=FAULTS, budget=3).explore(), 15_000, 1)


def test_a_room_that_waits_for_its_prompt_and_any_two_faults():
    """The allocation policy prefill_complete."""
    model = Model(sources=1, faults=FAULTS, budget=2, computed_first=True)
    assert_sound(model.explore(), 7_000, 1)


@pytest.mark.slow
def test_layers_that_go_before_their_chunk_and_any_fault():
    assert_sound(Model(sources=1, faults=FAULTS, budget=1, by_layers=True).explore(), 15_000, 1)


# Of the three largest worlds each run has one.
@pytest.mark.slow
@pytest.mark.by_turns("layers and two faults")
@pytest.mark.timeout(400)  # 30 s of a processor, which others may want as well
def test_layers_that_go_before_their_chunk_and_any_two_faults():
    assert_sound(Model(sources=1, faults=FAULTS, budget=2, by_layers=True).explore(), 120_000, 1)


@pytest.mark.slow
def test_digests_and_any_two_faults():
    """No room is done before they are equal, and no page is let go while one is made."""
    assert_sound(Model(sources=1, faults=FAULTS, budget=2, digests=True).explore(), 8_000, 1)


@pytest.mark.slow
@pytest.mark.by_turns("two ranks and any fault")
@pytest.mark.timeout(400)
def test_two_prefill_ranks_and_any_fault():
    assert_sound(Model(sources=2, faults=FAULTS, budget=1).explore(), 75_000, 2)


@pytest.mark.slow
@pytest.mark.by_turns("two ranks and two faults")
@pytest.mark.timeout(400)
def test_two_prefill_ranks_an_abort_and_the_loss_of_a_link():
    faults = frozenset({"decode abort", "loss"})
    found = Model(sources=2, faults=faults, budget=2, lands_at_once=True).explore()
    assert found.problems == {}
    assert {("failed", "failed/aborted"), ("aborted", "failed/aborted")} <= set(found.ends)


@pytest.fixture
def chunks_in_any_order(monkeypatch):
    """The rules of before finding A1 was mended: whatever the scheduler sends is taken."""
    monkeypatch.setattr(prefill, "chunk_problem", lambda *_: None)


@pytest.mark.usefixtures("chunks_in_any_order")
def test_a_last_chunk_that_overtakes_is_found_when_nobody_checks():
    problems = Model(sources=1, compare_completions=False).explore().problems
    assert "a prefill room is done with a page missing" in problems
    way = problems["the decode room is done with a page missing"]
    assert "p0: chunk 1" in way
    assert "p0: chunk 0" not in way


@pytest.mark.usefixtures("chunks_in_any_order")
def test_the_completion_record_alone_keeps_the_decode_side_from_a_room_with_a_page_missing():
    problems = Model(sources=1).explore().problems
    assert set(problems) == {"a prefill room is done with a page missing"}


def test_a_room_that_lets_its_pages_go_while_digests_are_made_is_found(monkeypatch):
    monkeypatch.setattr(prefill_room.PrefillRoom, "is_quiet", property(lambda one: not one.writes))
    problems = Model(sources=1, budget=0, digests=True).explore().problems
    assert "a prefill room is over while digests are made of its pages" in problems


def test_a_batch_that_is_dropped_after_a_late_fence_is_found():
    problems = Model(sources=1, drop_after_fence=True).explore().problems
    way = problems["the decode room never ends"]
    assert way[-2:] == ["p0: ((0, 0), (0, 1)) begin to land", "decode loop: ('aborted',)"]
