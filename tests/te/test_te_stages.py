# SPDX-License-Identifier: Apache-2.0
"""The table of a transfer's stages (te/core/stages.h): no dead ends, no way back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from te_tables import read_table

pytestmark = pytest.mark.pure

STAGES_H: Final = Path(__file__).parents[2] / "te" / "core" / "stages.h"


_, _, TABLE = read_table(STAGES_H.read_text())
#: Where the destination has answered. `conclude` in te/core/transfer.pyx makes OVER of these.
ANSWERED = {"IS_LANDED", "IS_REFUSED", "IS_ABANDONED"}
HAPPENINGS = sorted({happening for row in TABLE.values() for happening in row})
#: What ends a transfer that has been given up, or was refused, without a byte more.
GIVEN_UP = {"STOPPING", "ABANDON_SENT", "REFUSED_EARLY", "IS_REFUSED", "IS_ABANDONED", "OVER"}


def following(stage: str) -> set[str]:
    """The stages that may come directly behind it."""
    return set(TABLE[stage].values()) | ({"OVER"} if stage in ANSWERED else set())


def reached(start: str) -> set[str]:
    """All that may come behind it."""
    found, new = set[str](), following(start)
    while new - found:
        found |= new
        new = set().union(*(following(one) for one in found))
    return found


def after(happenings: list[str]) -> list[str]:
    """The stages that a transfer goes through; what cannot happen changes nothing."""
    found = ["QUEUED"]
    for happening in happenings:
        found.append(TABLE[found[-1]].get(happening, found[-1]))
    return found


def test_every_stage_but_the_first_is_reached_and_the_first_never_again() -> None:
    assert reached("QUEUED") == set(TABLE) - {"QUEUED"}


@pytest.mark.parametrize("stage", sorted(set(TABLE) - {"OVER"}))
def test_no_stage_is_a_dead_end(stage: str) -> None:
    """By what the destination answers: nothing has to break for it."""
    assert "OVER" in reached(stage)


def test_an_answer_is_the_last_word() -> None:
    assert not any(TABLE[stage] for stage in {"OVER", *ANSWERED})


def test_what_was_given_up_never_moves_again() -> None:
    for stage in GIVEN_UP:
        assert reached(stage) <= GIVEN_UP
    for row in TABLE.values():
        assert row.get("GIVEN_UP", "STOPPING") in {"STOPPING", "REFUSED_EARLY"}
        assert row.get("REFUSES", "REFUSED_EARLY") in {"REFUSED_EARLY", "IS_REFUSED"}


def test_only_what_was_sent_as_a_whole_can_have_landed() -> None:
    assert [stage for stage in TABLE if "LANDS" in TABLE[stage]] == ["SENT"]
    assert [stage for stage in TABLE if "SENT" in following(stage)] == ["MOVING"]


@given(st.lists(st.sampled_from(HAPPENINGS), max_size=40))
def test_no_sequence_of_happenings_leaves_the_table(happenings: list[str]) -> None:
    found = after(happenings)
    assert set(found) <= set(TABLE)
    # Whatever was left out or came twice: the destination's last word ends it, once it is asked.
    *_, told = after([*happenings, "BEGINS", "GIVEN_UP", "SENDS_ABANDON", "ABANDONS", "REFUSES"])
    assert told in ANSWERED
    for one, other in itertools.pairwise(found):
        assert one == other or other in following(one)
        assert one not in GIVEN_UP or other in GIVEN_UP
