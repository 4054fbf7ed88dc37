# SPDX-License-Identifier: Apache-2.0
"""The figures of one rank, and the file that holds them."""

from __future__ import annotations

import os

import msgspec
import pytest
from handover import NEVER_S, make_context, until

import te
from sglang_mooncake import stats
from sglang_mooncake.context import Deadlines
from sglang_mooncake.rooms.room import Room, RoomView
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.stats import Recorder
from te.stats import FenceStats

ENGINE = te.Stats(
    *(0,) * 5,
    peers=2,
    rails=2,
    transports=("samehost", "tcp"),
    peer_transports={"a": ("tcp", "another host"), "b": ("tcp", "another host")},
    peer_bytes_per_s={"a": 1.25e9, "b": 0.0},
    by_transport={},
    fences=FenceStats(0, 0.0, 0),
    connects=2,
    connects_fallen_back=2,
    registered_bytes={},
)


def make_recorder(directory):
    context = make_context("prefill", "127.0.0.1:1", Deadlines())
    return Recorder(context, {"manager": "a.B"}, lambda: ENGINE, directory)


@pytest.fixture
def often_written(monkeypatch):
    monkeypatch.setattr(stats, "_WRITE_INTERVAL_S", 0.02)


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "_WRITE_TIMEOUT_S", NEVER_S)
    made = make_recorder(tmp_path / "new")
    made.path = tmp_path / "new" / f"prefill-{os.getpid()}.json"
    yield made
    made.close()


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
        recorder.room_over(Room(1, 0.0, RoomView(state)))
    recorder.open_rooms = lambda: (Room(2, 0.0), Room(3, 0.0), Room(2, 1.0))
    assert recorder.snapshot()["rooms"] == {"done": 1, "failed": 1, "aborted": 2, "open": 3}


def test_the_file_is_whole_and_kept_by_a_thread_of_its_own(often_written, recorder):
    with recorder.scheduler_call("send"):
        pass
    recorder.handed_over(0.25)

    def written():
        return msgspec.json.decode(recorder.path.read_bytes())

    until(lambda: recorder.path.exists() and written()["handover_ms"] == [250.0], "it is written")
    assert written()["rank"] == {"dp": 0, "cp": 0, "tp": 0, "pp": 0}
    assert (written()["transport"], written()["rails"]) == ("tcp", 2)
    assert written()["bytes_per_s_at_best"] == 1.25e9
    assert len(written()["scheduler_call_us"]["send"]) == 1
    assert written()["classes"] == {"manager": "a.B"}
    recorder.handed_over(0.5)
    until(lambda: written()["handover_ms"] == [250.0, 500.0], "it is written again")
    recorder.close()
    assert [path.name for path in recorder.path.parent.iterdir()] == [recorder.path.name]


def test_the_file_says_who_serves_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "_WRITE_INTERVAL_S", 600.0)
    made = make_recorder(tmp_path)
    path = tmp_path / f"prefill-{os.getpid()}.json"
    until(path.exists, "it is written")
    assert msgspec.json.decode(path.read_bytes())["classes"] == {"manager": "a.B"}
    made.close()


def test_the_last_figures_are_in_the_file_that_a_rank_leaves(recorder):
    recorder.handed_over(0.25)
    recorder.close()
    assert msgspec.json.decode(recorder.path.read_bytes())["handover_ms"] == [250.0]


def test_a_file_that_cannot_be_written_in_time_holds_up_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "_WRITE_TIMEOUT_S", 0.1)
    path = tmp_path / f"prefill-{os.getpid()}.tmp"
    os.mkfifo(path)  # a write to it waits for a reader, as one to a file server that hangs
    made = make_recorder(tmp_path)
    until(made._write_lock.locked, "the thread waits for the file")
    made.handed_over(0.25)
    made.room_over(Room(1, 0.0, RoomView(RoomState.DONE)))
    made.close()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    until(lambda: not made._write_lock.locked(), "the thread goes on")
    os.close(reader)


def test_a_call_that_raises_is_measured_and_raises(recorder):
    with pytest.raises(KeyError), recorder.scheduler_call("poll"):
        raise KeyError
    assert len(recorder.snapshot()["scheduler_call_us"]["poll"]) == 1
