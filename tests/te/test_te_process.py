# SPDX-License-Identifier: Apache-2.0
"""Which process a peer is, and who may read this one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from te_raw import (
    dial_unix,
)

import te
from te.transports.samehost.process import (
    Readers,
    common_ancestor,
    parent_of,
    peer_process,
)


@pytest.mark.parametrize("option", [77, 9999])
def test_the_process_of_a_peer(option: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its descriptor (SO_PEERPIDFD), and where the kernel has none by its number."""
    monkeypatch.setattr("te.transports.samehost.process._SO_PEERPIDFD", option)
    with te.Engine() as engine, dial_unix(engine.card()) as sock:
        process = peer_process(sock)
        assert not isinstance(process, str)
        assert process.pid == os.getpid()
        assert process.lives()
        process.close()


# -- Yama's one exception

#: A first process, two servers below a shell, and their ranks.
PARENTS = {10: 1, 20: 10, 21: 20, 22: 20, 30: 10, 31: 30, 40: 1, 41: 40}


@pytest.mark.pure
@pytest.mark.parametrize(
    ("pids", "ancestor"),
    [
        ([21], 21),
        ([21, 21], 21),
        ([21, 22], 20),
        ([21, 20], 20),
        ([21, 31], 10),
        ([21, 22, 31], 10),
        ([21, 41], None),
        ([1], None),
        ([21, 99], None),
    ],
)
def test_who_stands_for_several_processes(pids: list[int], ancestor: int | None) -> None:
    assert common_ancestor(pids, lambda pid: PARENTS.get(pid, 0)) == ancestor


def test_readers_are_let_in_one_by_one_and_only_where_yama_asks(tmp_path: Path) -> None:
    scope, told = tmp_path / "ptrace_scope", list[int]()
    readers = Readers(scope, told.append)
    with contextlib.ExitStack() as undo:
        children = []
        for _ in range(2):
            child = undo.enter_context(subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL))
            undo.callback(child.kill)
            children.append(child)
        one, two = (child.pid for child in children)
        assert readers.allow(one) is None  # There is no Yama.
        scope.write_text("0\n")
        assert readers.allow(one) is None
        assert told == []
        scope.write_text("1\n")
        assert readers.allow(os.getpid()) is None
        assert readers.allow(one) is None
        assert readers.allow(one) is None
        assert told == [one, one]
        assert readers.allow(two) is None
        assert told[2:] == [os.getpid()]  # The one that both descend from.
        children[0].send_signal(signal.SIGKILL)
        children[0].wait()
        assert readers.allow(two) is None
        assert told[3:] == [two]
    assert parent_of(one) == 0


def test_a_reader_that_cannot_be_let_in_is_refused_with_the_cure(tmp_path: Path) -> None:
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    problem = Readers(scope, lambda _: None).allow(1)
    assert problem is not None
    assert "sysctl kernel.yama.ptrace_scope=0" in problem

    def refuse(_: int) -> None:
        raise OSError(22, "Invalid argument")

    problem = Readers(scope, refuse).allow(os.getppid())
    assert problem is not None
    assert "Invalid argument" in problem or "shares" in problem
