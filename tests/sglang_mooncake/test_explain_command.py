# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake explain` asks real ranks, and says clearly what it cannot tell."""

from __future__ import annotations

import json
import re

import pytest
from handover import WAIT_S, handover, until

from sglang_mooncake.explain.questions import COUNT_MAX
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang import explaining
from sglang_mooncake.sglang.cli import main
from te.errors import StatusSocketError
from te.status import ask


@pytest.fixture
def pair(monkeypatch):
    """Both ranks; whoever asks them has the time of a loaded machine."""
    monkeypatch.setattr(explaining, "_TIMEOUT_S", WAIT_S)
    with handover() as ranks:
        ranks.decode.know(ranks.address)
        yield ranks


@pytest.fixture
def directory(pair):
    path = pair.prefill.engine.status_path
    assert path is not None
    return path.parent


def both_tell_of(pair, room):
    """A little after it is over."""
    return all(one.recorder.stories.of_room(room) for one in (pair.prefill, pair.decode))


def hand_over(pair, room, pages=(1, 2)):
    source, target = pair.open_both(room)
    pair.name_pages(target, list(pages), aux=0)
    until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
    pair.prefill.send(source, list(pages), 0, 0)
    until(lambda: pair.decode.side.has_arrived(target), "the room has arrived")
    pair.decode.side.arrived(target)
    until(lambda: source.view.over and target.view.over, "both sides are done")
    until(lambda: both_tell_of(pair, room), "both can tell of it")


def run(capsys, *arguments):
    status = main(["explain", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_both_ranks_tell_of_a_room(pair, directory, capsys, tmp_path):
    hand_over(pair, 41)
    hand_over(pair, 42)
    status, text, _ = run(capsys, 42, "--dir", directory, "--svg", tmp_path / "room.svg")
    assert status == 0
    assert "room 42: done" in text
    assert "decode rank (dp 0 cp 0 tp 0 pp 0)" in text
    assert "prefill rank (dp 0 cp 0 tp 0 pp 0)" in text
    assert " over samehost: 2 pages" in text
    assert (tmp_path / "room.svg").read_text().startswith("<svg ")
    assert run(capsys, "--last", "--dir", directory)[1].startswith("room 42: done")
    drawing = tmp_path / "slowest.svg"
    slow = run(capsys, "--slowest", 2, "--dir", directory, "--svg", drawing)[1]
    assert {"room 41: done", "room 42: done"} == {
        line.split(",")[0] for line in slow.splitlines() if line.startswith("room ")
    }
    assert {">Room 41: ", ">Room 42: "} <= set(re.findall(r">Room \d+: ", drawing.read_text()))


def test_the_stages_add_up_to_the_measured_hand_over(pair, directory, capsys):
    """The recorder measures from the last `send()` until all has landed."""
    for room in range(20):
        hand_over(pair, room)
    _, text, _ = run(capsys, "--slowest", 20, "--json", "--dir", directory)
    stories = {
        story["room"]: story
        for one in json.loads(text)
        if one["role"] == "prefill"
        for story in one["stories"]
    }
    measured = pair.prefill.recorder.snapshot()["handover_ms"]
    for room, handover_ms in enumerate(measured):
        marks = stories[room]["marks"]
        told_ms = (marks["acknowledged"] - marks["queued"]) * 1e3
        assert told_ms == pytest.approx(handover_ms, rel=0.05, abs=0.2)


def test_what_several_hosts_have_told_is_shown_together(pair, directory, capsys, tmp_path):
    hand_over(pair, 43)
    _, text, _ = run(capsys, 43, "--json", "--dir", directory)
    answers = {one["role"]: one for one in json.loads(text)}
    files = [tmp_path / f"{role}.json" for role in ("prefill", "decode")]
    for path, role in zip(files, ("prefill", "decode"), strict=True):
        path.write_text(json.dumps([answers[role] | {"boot_id": role, "host": role}]))
    status, text, _ = run(capsys, 43, "--from", *files)
    assert status == 0
    assert "room 43: done" in text
    assert "on 2 ranks of 2 hosts" in text


def test_a_failed_and_an_open_room_are_told_of(pair, directory, capsys):
    source, target = pair.open_both(44)
    assert "(not over yet)" in run(capsys, 44, "--dir", directory)[1]
    pair.decode.side.abort(target, "the client left")
    pair.name_pages(pair.open_both(45)[1], [1], aux=0)
    pair.prefill.side.abort(source, "the scheduler is done with it")
    until(lambda: source.view.over and target.view.over, "both sides have ended")
    until(lambda: both_tell_of(pair, 44), "both can tell of it")
    status, text, _ = run(capsys, 44, "--dir", directory)
    assert status == 0
    assert "room 44: aborted" in text
    assert "It failed: " in text


def test_what_no_rank_knows_is_said(pair, directory, capsys):
    status, _, error = run(capsys, "--last", "--dir", directory)
    assert status == 1
    assert "no request has ended yet on the 2 ranks" in error
    hand_over(pair, 46)
    said = "none of the 2 ranks that were asked knows room 999. They have ended 2 rooms"

    def both_have_counted() -> bool:
        status, _, error = run(capsys, 999, "--dir", directory)
        assert status == 1
        return said in error

    until(both_have_counted, "both have counted the room")


def test_without_ranks_it_says_where_it_looked(tmp_path, capsys):
    status, _, error = run(capsys, "--last", "--dir", tmp_path)
    assert status == 2
    assert "no rank of this user runs on this host" in error
    tmp_path.chmod(0o755)
    status, _, error = run(capsys, "--last", "--dir", tmp_path)
    assert status == 2
    assert "chmod 700" in error


def test_files_that_are_no_stories_are_named(tmp_path, capsys):
    status, _, error = run(capsys, 1, "--from", tmp_path / "missing.json")
    assert (status, "cannot read" in error) == (2, True)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"rank": 5}]')
    status, _, error = run(capsys, 1, "--from", bad)
    assert (status, f"{bad} is not an output of --json" in error) == (2, True)


def test_a_drawing_that_cannot_be_written_is_an_error(pair, directory, capsys, tmp_path):
    hand_over(pair, 47)
    status, _, error = run(capsys, 47, "--dir", directory, "--svg", tmp_path / "no" / "a.svg")
    assert (status, "cannot write" in error) == (2, True)


@pytest.mark.parametrize("count", ["0", str(COUNT_MAX + 1), "x"])
def test_a_bad_number_is_refused(count, capsys):
    with pytest.raises(SystemExit):
        main(["explain", "--slowest", count])
    assert f"is not a whole number from 1 to {COUNT_MAX}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "arguments", "says"),
    [
        ("last", {"count": 0}, "count is 0; a rank tells of 1 to 64 rooms at once"),
        ("slowest", {"count": 65}, "count is 65"),
        ("room", {}, "room is None, and must be a whole number"),
        ("room", {"room": "7"}, "room is '7', and must be a whole number"),
    ],
)
def test_a_rank_refuses_bad_questions(pair, question, arguments, says):
    with pytest.raises(StatusSocketError, match=says):
        ask(pair.prefill.engine.status_path, question, arguments, WAIT_S)
