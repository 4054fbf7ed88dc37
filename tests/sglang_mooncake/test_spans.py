# SPDX-License-Identifier: Apache-2.0
"""A room's story as spans of a trace: times of the wall clock, stages without gaps, errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_story import TIMES, prefill, room, write

from sglang_mooncake.rooms.room import Room, RoomTimes, RoomView
from sglang_mooncake.rooms.states import ENDS, RoomState
from sglang_mooncake.rooms.write_story import SEVERAL, WriteStory
from sglang_mooncake.spans import span
from sglang_mooncake.story import tell

EPOCH_NS = 1_700_000_000_000_000_000
S = 1_000_000_000


def test_a_prefill_ranks_hand_over_with_its_stages_and_writes():
    told = span(prefill(), EPOCH_NS, 3)
    assert told.name == "send KV cache"
    assert (told.began_ns, told.ended_ns) == (EPOCH_NS + 10 * S, EPOCH_NS + 13 * S)
    assert told.error is None
    assert {one.name: (one.began_ns - EPOCH_NS) / S for one in told.children} == {
        "bootstrap": 10.0,
        "queued": 10.5,
        "planned": 12.0,
        "posted": 12.1,
        "acknowledged": 12.3,
    }
    assert told.attributes == {
        "bootstrap_room": "0x7",
        "sglang_mooncake.room": "7",
        "sglang_mooncake.rank": "rank",
        "sglang_mooncake.outcome": "done",
        "sglang_mooncake.pages": 0,
        "sglang_mooncake.bytes": 0,
        "sglang_mooncake.peers": ("decode rank 0",),
        "sglang_mooncake.transports": ("tcp",),
    }
    (event,) = told.events
    assert (event.name, event.at_ns) == ("write landed", EPOCH_NS + 2 * S)
    assert event.attributes["sglang_mooncake.peer"] == "decode rank 0"
    assert event.attributes["sglang_mooncake.bytes"] == 100
    assert event.attributes["sglang_mooncake.seconds"] == 1.0


def test_a_decode_ranks_hand_over_names_no_transport():
    use = room(met_s=11.0, named_s=11.5, planned_s=11.6, landed_s=14.0)
    told = span(tell(use, "decode", "rank", 14.5), EPOCH_NS, 3)
    assert told.name == "receive KV cache"
    assert [one.name for one in told.children][-2:] == ["landed", "acknowledged"]
    assert "sglang_mooncake.transports" not in told.attributes
    assert not told.events


def test_of_writes_that_were_merged_one_event_says_how_many():
    plain = write(peer="decode rank 1")
    several = WriteStory(SEVERAL, "", 1.0, 2.0, 100, 10, 2, early=True, failed=2, count=3)
    use = room(met_s=10.5, named_s=12.0, planned_s=12.1, posted_s=12.3)
    told = span(tell(use, "prefill", "rank", 13.0, writes=[plain, several]), EPOCH_NS, 3)
    assert told.attributes["sglang_mooncake.transports"] == ("tcp",)
    assert [one.name for one in told.events] == ["write landed", "write failed"]
    more = told.events[1].attributes.keys() - told.events[0].attributes.keys()
    assert {name: told.events[1].attributes[name] for name in more} == {
        "sglang_mooncake.early": True,
        "sglang_mooncake.writes": 3,
        "sglang_mooncake.failed_writes": 2,
    }


@pytest.mark.parametrize(("level", "stages", "writes"), [(1, 0, 0), (2, 5, 0), (3, 5, 1)])
def test_sglangs_trace_level_says_how_much_is_told(level, stages, writes):
    told = span(prefill(), EPOCH_NS, level)
    assert (len(told.children), len(told.events)) == (stages, writes)


@pytest.mark.parametrize("state", [RoomState.FAILED, RoomState.TIMED_OUT])
def test_a_hand_over_that_failed_is_an_error_in_the_stage_in_which_it_failed(state):
    use = room(state, reason="the peer died", met_s=11.0)
    told = span(tell(use, "prefill", "rank", 12.0, writes=[write(failed=1)]), EPOCH_NS, 3)
    assert told.error == "the peer died"
    assert told.attributes["error.type"] == state.value
    assert told.attributes["sglang_mooncake.reason"] == "the peer died"
    assert {one.name: one.error for one in told.children} == {
        "bootstrap": None,
        "queued": "the peer died",
    }
    assert [one.name for one in told.events] == ["write failed"]


def test_a_failure_without_a_reason_is_named_by_its_end():
    assert span(tell(room(RoomState.FAILED), "decode", "rank", 12.0), 0, 1).error == "failed"


@pytest.mark.parametrize("state", [RoomState.ABORTED, RoomState.SUPERSEDED])
def test_what_somebody_asked_for_is_no_error(state):
    use = room(state, reason="aborted by the scheduler of the decode server")
    told = span(tell(use, "decode", "rank", 12.0), EPOCH_NS, 3)
    assert told.error is None
    assert "error.type" not in told.attributes
    assert told.attributes["sglang_mooncake.outcome"] == state.value
    assert told.attributes["sglang_mooncake.reason"].startswith("aborted by")
    assert all(one.error is None for one in told.children)


@given(
    role=st.sampled_from(["prefill", "decode"]),
    state=st.sampled_from(sorted(ENDS, key=lambda one: one.value)),
    times=st.tuples(*(TIMES for _ in RoomTimes.__struct_fields__)),
    opened_s=TIMES,
    lasted_s=TIMES,
)
def test_stages_follow_each_other_and_fill_the_span(role, state, times, opened_s, lasted_s):
    room = Room(7, opened_s, RoomView(state, times=RoomTimes(*times)))
    told = span(tell(room, role, "rank", opened_s + lasted_s), EPOCH_NS, 2)
    edges = [told.began_ns]
    for child in told.children:
        assert child.began_ns == edges[-1]
        assert child.ended_ns >= child.began_ns
        edges.append(child.ended_ns)
    assert edges[-1] == told.ended_ns
