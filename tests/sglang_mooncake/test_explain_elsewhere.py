# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake explain --on` asks ranks of other hosts by commands, and says which did not
tell."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from handover import until
from test_explain_command import directory, hand_over, pair, run

from sglang_mooncake.explain import elsewhere
from sglang_mooncake.explain.elsewhere import NotTold, ask_there

__all__ = ["directory", "pair"]  # fixtures


def script(path: Path, text: str) -> str:
    """A program; its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def near(pair, tmp_path):
    """Where the prefill rank alone has its socket."""
    return _alone(pair.prefill, tmp_path / "near")


@pytest.fixture
def there(pair, tmp_path):
    """A command that runs the program where the decode rank alone has its socket. As `ssh` does, it
    has a shell read its words."""
    far = _alone(pair.decode, tmp_path / "far")
    program = f"{sys.executable} -m sglang_mooncake.sglang.cli"
    # The directory that it is given is the near one's.
    return script(
        tmp_path / "sglang-mooncake",
        f'exec /bin/sh -c "{program} $(echo "$*" | sed s,/near,/far,)"',
    ), far


def _alone(rank, path: Path) -> Path:
    path.mkdir(mode=0o700)
    os.link(rank.engine.status_path, path / rank.engine.status_path.name)
    return path


@pytest.mark.slow
def test_the_ranks_of_both_hosts_are_one_timeline(pair, near, there, capsys):
    command, _ = there
    hand_over(pair, 51)
    hand_over(pair, 52)
    for which, room in ((51, 51), ("--last", 52)):
        status, text, error = run(capsys, which, "--dir", near)
        assert (status, error) == (0, "")
        assert "on 1 rank of 1 host" in text
        assert "Not shown: decode rank (dp 0 cp 0 tp 0 pp 0) at 127.0.0.1. These ranks" in text
        status, text, error = run(capsys, which, "--dir", near, "--on", command)
        assert (status, error) == (0, "")
        assert f"room {room}: done" in text
        assert "on 2 ranks of 1 host" in text
        assert "Not shown" not in text


@pytest.mark.slow
def test_several_rooms_are_asked_for_everywhere(pair, near, there, capsys):
    for room in (53, 54, 55):
        hand_over(pair, room)
    _, text, _ = run(capsys, "--slowest", 2, "--dir", near, "--on", there[0])
    assert text.count("on 2 ranks of 1 host") == 2


@pytest.mark.slow
def test_a_host_that_is_asked_twice_tells_once(pair, near, there, capsys):
    hand_over(pair, 56)
    status, text, _ = run(capsys, 56, "--dir", near, "--on", there[0], there[0])
    assert status == 0
    assert "on 2 ranks of 1 host" in text
    assert text.count("decode rank (dp 0 cp 0 tp 0 pp 0) at 127.0.0.1: done") == 1


@pytest.mark.slow
def test_this_host_needs_no_rank(pair, near, there, capsys, tmp_path):
    hand_over(pair, 57)
    (tmp_path / "none").mkdir(mode=0o700)
    command = script(
        tmp_path / "elsewhere", f'shift; exec {there[0]} "$1" "$2" --dir {there[1]} --json'
    )
    status, text, _ = run(capsys, 57, "--dir", tmp_path / "none", "--on", command)
    assert status == 0
    assert "room 57: done" in text


@pytest.mark.slow
def test_a_host_that_cannot_be_asked_is_left_out_and_named(pair, near, there, capsys, tmp_path):
    hand_over(pair, 58)
    broken = script(tmp_path / "broken", "echo Connection refused >&2; exit 255")
    status, text, error = run(capsys, 58, "--dir", near, "--on", broken, there[0])
    assert status == 0
    assert "on 2 ranks of 1 host" in text
    assert "a host is left out: " in error
    assert "broken sglang-mooncake explain 58" in error
    assert "ended with status 255: Connection refused" in error


def test_where_no_host_can_be_asked_it_fails(tmp_path, capsys):
    broken = script(tmp_path / "broken", "exit 255")
    tmp_path.chmod(0o700)
    status, _, error = run(capsys, 58, "--dir", tmp_path, "--on", broken)
    assert status == 2
    assert "no host could be asked: " in error


@pytest.mark.slow
def test_a_room_that_no_host_knows(pair, near, there, capsys):
    status, _, error = run(capsys, 999, "--dir", near, "--on", there[0])
    assert status == 1
    assert "knows room 999" in error


def test_files_and_hosts_exclude_each_other(capsys):
    with pytest.raises(SystemExit):
        run(capsys, 1, "--from", "a.json", "--on", "ssh a")
    assert "not allowed with argument --from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exit 3", "ended with status 3: no reason"),
        ("exit 1", "ended with status 1: no reason"),
        ("echo hello", "printed something else"),
        ("echo '[{\"rank\": 5}]'", "printed something else"),
        ("yes", "printed more than 1000 bytes"),
    ],
)
def test_a_command_that_does_not_tell(tmp_path, monkeypatch, text, says):
    monkeypatch.setattr(elsewhere, "ANSWER_BYTES_MAX", 1000)
    with pytest.raises(NotTold, match=says):
        ask_there(script(tmp_path / "x", text), ["1"])


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path, monkeypatch):
    """Its child holds the pipe open."""
    temporary, written = tmp_path / "temporary", tmp_path / "child"
    said = f"echo $! > {temporary}; mv {temporary} {written}"
    command = script(tmp_path / "x", f"sleep 1000 & {said}; exit 0")

    class Late(threading.Timer):
        """Not before the child is there, however slowly the command starts."""

        def run(self) -> None:
            until(written.exists, "the child has been started")
            super().run()

    monkeypatch.setattr(elsewhere.threading, "Timer", Late)
    with pytest.raises(NotTold, match=r"x sglang-mooncake explain 1 --json did not end within 1 s"):
        ask_there(command, ["1"], timeout_s=1.0)
    child = int(written.read_text())
    until(lambda: _has_ended(child), "the child has ended")


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("command", "arguments", "says"),
    [
        ("", ["1"], "an empty command runs nowhere"),
        ("ssh 'a", ["1"], "is no command: No closing quotation"),
        ("/nowhere/ssh a", ["1"], "cannot run /nowhere/ssh: No such file or directory"),
        ("ssh a", ["--dir", "/a b"], "'/a b' cannot be passed on"),
    ],
)
def test_a_command_that_cannot_be_run(command, arguments, says):
    with pytest.raises(NotTold, match=says):
        ask_there(command, arguments)
