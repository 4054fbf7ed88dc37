# SPDX-License-Identifier: Apache-2.0
"""What other threads see of a room: one view an event, which never changes."""

from __future__ import annotations

import numpy as np
import pytest
from counted_tags import CountedTags

from sglang_mooncake.rooms import decode
from sglang_mooncake.rooms.room import Publisher, Record, Room
from sglang_mooncake.rooms.states import (
    TRANSITIONS_DECODE,
    IllegalTransition,
    RoomState,
    Step,
)


class Watched(Room):
    """Keeps each view that it has shown."""

    __slots__ = ("shown",)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "view":
            super().__setattr__("shown", [*getattr(self, "shown", []), value])


def test_nothing_is_shown_before_the_event_is_dealt_with():
    views, record = Publisher(TRANSITIONS_DECODE), Record(Room(1, 0.0))
    before = record.room.view
    views.change(record, reason="gone", end=RoomState.FAILED)
    views.mark(record, met_s=1.0)
    views.advance(record, Step.END, Step.QUIET, safe=True)
    assert record.room.view is before
    views.publish()
    shown = record.room.view
    assert (shown.state, shown.reason, shown.safe) == (RoomState.FAILED, "gone", True)
    assert shown.times.met_s == 1.0
    assert (before.state, before.reason) == (RoomState.OPEN, None), "who has it keeps it"
    views.publish()
    assert record.room.view is shown


def test_a_view_cannot_be_changed():
    with pytest.raises(AttributeError, match="immutable"):
        Room(1, 0.0).view.state = RoomState.DONE


def test_a_step_that_the_state_does_not_allow_changes_nothing():
    views, record = Publisher(TRANSITIONS_DECODE), Record(Room(7, 0.0))
    with pytest.raises(IllegalTransition, match=r"room 7: in state 'open' 'no byte .* cannot"):
        views.advance(record, Step.QUIET, safe=True)
    views.publish()
    assert record.room.view == Room(7, 0.0).view


def test_a_room_shows_itself_once_for_each_event():
    rooms = decode.DecodeRooms(decode.DecodeDeadlines(10.0, 20.0), 4, 100, CountedTags(200))
    room = Watched(1, 0.0)
    rooms.handle(decode.Opened(room), 0.0)
    rooms.handle(decode.SourcesChosen(room, (decode.RoomSource("p0"),)), 0.0)
    rooms.handle(decode.PagesNamed(room, np.array([4]), 0, 0), 0.0)
    rooms.handle(decode.LinkUp("p0"), 0.0)  # linked, met and asked for in one event
    rooms.handle(decode.LinkDown("p0", "gone"), 0.0)
    rooms.handle(decode.Fenced(room), 0.0)
    states = [view.state.value for view in room.shown]
    assert states == ["open", "open", "open", "requested", "ending", "failed"]
