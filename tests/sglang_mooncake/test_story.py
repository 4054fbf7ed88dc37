# SPDX-License-Identifier: Apache-2.0
"""Where a room's time went: stages that add up, and a record that stays bounded."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.rooms.room import Room, RoomTimes, RoomView
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.rooms.write_story import SEVERAL, WRITES_MAX, WriteStory, merged
from sglang_mooncake.story import SLOWEST, STAGES, RoomStory, Stories, tell

TIMES = st.floats(0.0, 100.0, allow_nan=False)


def write(began_s=1.0, ended_s=2.0, peer="decode rank 0", early=False, failed=0):
    return WriteStory(peer, "tcp", began_s, ended_s, 100, 10, 2, early, failed)


def room(state=RoomState.DONE, opened_s=10.0, reason=None, **times):
    return Room(7, opened_s, RoomView(state, reason, times=RoomTimes(**times)))


@given(
    role=st.sampled_from(["prefill", "decode"]),
    state=st.sampled_from(RoomState),
    times=st.builds(RoomTimes, TIMES, TIMES, TIMES, TIMES, TIMES),
    opened_s=TIMES,
    lasted_s=TIMES,
)
def test_stages_add_up_to_the_rooms_time_whatever_was_reached(
    role, state, times, opened_s, lasted_s
):
    room = Room(7, opened_s, RoomView(state, times=times))
    story = tell(room, role, "rank", opened_s + lasted_s)
    stages = story.stages()
    assert sum(stages.values()) == pytest.approx(story.duration_s, abs=1e-9)
    assert min(stages.values(), default=0.0) >= 0
    assert list(stages) == [stage for stage in STAGES if stage in stages], "in their order"
    assert ("posted" if role == "decode" else "landed") not in stages
    if state is RoomState.DONE:
        assert list(story.marks)[-1] == "acknowledged"


def prefill():
    use = room(met_s=10.5, named_s=12.0, planned_s=12.1, posted_s=12.3)
    return tell(use, "prefill", "rank", 13.0, writes=[write()])


def test_a_prefill_ranks_stages():
    story = prefill()
    assert story.stages() == pytest.approx(
        {"bootstrap": 0.5, "queued": 1.5, "planned": 0.1, "posted": 0.2, "acknowledged": 0.7}
    )
    assert story.peers == ("decode rank 0",)


def test_pages_that_were_named_before_the_links_were_known_do_not_count_twice():
    use = room(met_s=11.0, named_s=10.2, planned_s=11.0, landed_s=14.0)
    story = tell(use, "decode", "rank", 14.5)
    assert story.stages() == pytest.approx(
        {"bootstrap": 1.0, "queued": 0.0, "planned": 0.0, "landed": 3.0, "acknowledged": 0.5}
    )


@pytest.mark.parametrize(
    ("times", "stage"),
    [
        ({}, "bootstrap"),
        ({"met_s": 11.0}, "queued"),
        ({"met_s": 11.0, "named_s": 12.0, "planned_s": 12.0}, "posted"),
        ({"met_s": 11.0, "named_s": 12.0, "planned_s": 12.0, "posted_s": 12.5}, "acknowledged"),
    ],
)
def test_a_failed_rooms_last_time_belongs_to_the_stage_in_which_it_failed(times, stage):
    use = room(RoomState.FAILED, reason="the peer died", **times)
    story = tell(use, "prefill", "rank", 20.0)
    assert list(story.stages())[-1] == stage
    assert (story.end, story.reason) == ("failed", "the peer died")


def test_a_rank_without_a_byte_to_send_is_done_all_the_same():
    use = room(met_s=11.0, named_s=12.0, planned_s=12.0)
    story = tell(use, "prefill", "rank", 12.0)
    assert story.stages() == pytest.approx(
        {"bootstrap": 1.0, "queued": 1.0, "planned": 0.0, "posted": 0.0, "acknowledged": 0.0}
    )


@pytest.mark.slow
@given(
    st.lists(
        st.builds(write, TIMES, TIMES, st.sampled_from("abc"), st.booleans(), st.integers(0, 1)),
        max_size=3 * WRITES_MAX,
    )
)
def test_merged_writes_lose_no_byte(writes):
    kept = merged(writes)
    assert len(kept) <= WRITES_MAX
    for field in ("nbytes", "blocks", "pages", "count", "failed"):
        assert sum(getattr(one, field) for one in kept) == sum(getattr(o, field) for o in writes)
    if writes:
        assert min(one.began_s for one in kept) == min(one.began_s for one in writes)
        assert kept[-1] == writes[-1]


def test_writes_to_more_peers_than_are_told_of_lose_no_byte_either():
    writes = [write(peer=f"decode rank {i}") for i in range(500)]
    kept = merged(merged([*writes, *writes]))
    assert len(kept) == WRITES_MAX
    assert sum(one.nbytes for one in kept) == 100_000
    assert SEVERAL in {one.peer for one in kept}


def story(serial, duration_s=1.0, number=7):
    return RoomStory(number, serial, "decode", "rank", 0.0, duration_s, {}, "done")


def test_only_the_latest_and_the_slowest_are_kept():
    stories = Stories(4)
    for serial in range(100):
        stories.add(story(serial, duration_s=50.0 if serial == 3 else 1.0, number=serial % 10))
    assert [one.serial for one in stories.last(2)] == [98, 99]
    assert [one.serial for one in stories.last(1000)] == [96, 97, 98, 99]
    assert stories.last(0) == []
    assert stories.slowest(1)[0].serial == 3
    assert len(stories.slowest(1000)) == 4
    assert [one.serial for one in stories.of_room(3)] == [3], "one of the slowest"
    assert [one.serial for one in stories.of_room(9)] == [99]
    assert stories.count == 100


def test_slow_rooms_are_bounded_too():
    stories = Stories(65_536)
    for serial in range(2 * SLOWEST):
        stories.add(story(serial, duration_s=serial))
    kept = stories.slowest(10_000)
    assert [one.serial for one in kept] == list(range(2 * SLOWEST - 1, SLOWEST - 1, -1))


def test_nothing_is_kept_where_that_is_asked_for():
    stories = Stories(0)
    stories.add(story(1))
    assert (stories.last(10), stories.slowest(10), stories.of_room(7)) == ([], [], [])


def test_stories_go_through_messages_unchanged():
    told = tell(room(met_s=11.0), "prefill", "rank", 12.0, writes=[write()])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=RoomStory) == told
