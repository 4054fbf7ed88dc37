# SPDX-License-Identifier: Apache-2.0
"""The figures of one rank, and the file that holds them."""

from __future__ import annotations

import os

import msgspec
import pytest
from handover import make_context

import te
from sglang_mooncake.context import Deadlines
from sglang_mooncake.rooms.states import RoomState, RoomView
from sglang_mooncake.stats import Recorder

ENGINE = te.Stats(
    *(0,) * 5,
    peers=2,
    rails=2,
    transports=("samehost", "tcp"),
    peer_transports={"a": ("tcp", "another host"), "b": ("tcp", "another host")},
)


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(
        make_context("prefill", "127.0.0.1:1", Deadlines()),
        {"manager": "a.B"},
        lambda: ENGINE,
        tmp_path / "new",
    )
    made.path = tmp_path / "new" / f"prefill-{os.getpid()}.json"
    return made


def test_overlapping_transfers_count_their_time_once(recorder):
    for now_s, begins in [(1.0, True), (2.0, True), (3.0, False), (5.0, False), (7.0, True)]:
        if begins:
            recorder.transfer_began(now_s)
        else:
            recorder.transfer_ended(100, now_s)
    recorder.transfer_ended(50, 8.0)
    snapshot = recorder.snapshot()
    assert (snapshot["busy_s"], snapshot["bytes"]) == (5.0, 250)


def test_rooms_are_counted_by_their_end(recorder):
    for state in (RoomState.DONE, RoomState.ABORTED, RoomState.SUPERSEDED, RoomState.TIMED_OUT):
        recorder.room_over(RoomView(1, 0.0, state=state))
    recorder.open_rooms(3)
    assert recorder.snapshot()["rooms"] == {"done": 1, "failed": 1, "aborted": 2, "open": 3}


def test_the_file_is_whole_and_written_once_a_second(recorder):
    with recorder.scheduler_call("send"):
        pass
    recorder.handed_over(0.25)
    recorder.write_if_due(10.0)
    first = recorder.path.stat().st_mtime_ns
    recorder.write_if_due(10.5)
    assert recorder.path.stat().st_mtime_ns == first
    written = msgspec.json.decode(recorder.path.read_bytes())
    assert written["handover_ms"] == [250.0]
    assert written["rank"] == {"dp": 0, "cp": 0, "tp": 0, "pp": 0}
    assert (written["transport"], written["rails"]) == ("tcp", 2)
    assert len(written["scheduler_call_us"]["send"]) == 1
    assert written["classes"] == {"manager": "a.B"}
    assert [path.name for path in recorder.path.parent.iterdir()] == [recorder.path.name]
    recorder.handed_over(0.5)
    recorder.write_if_due(11.5)
    assert msgspec.json.decode(recorder.path.read_bytes())["handover_ms"] == [250.0, 500.0]


def test_a_call_that_raises_is_measured_and_raises(recorder):
    with pytest.raises(KeyError), recorder.scheduler_call("poll"):
        raise KeyError
    assert len(recorder.snapshot()["scheduler_call_us"]["poll"]) == 1
