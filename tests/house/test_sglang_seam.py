# SPDX-License-Identifier: Apache-2.0
"""What our code uses of SGLang is found in our code, and looked up in a release's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_seam.__main__ import OURS, main
from sglang_seam.release import Release, changes
from sglang_seam.uses import Use, uses

OUR_CODE = """
from sglang.srt.context import get_parallel, KVPoll
from sglang.srt.calls import ask as asked

TABLE = [("sglang.srt.queues", "Queue", "put")]
HOOKED = "sglang.srt.calls.ask"

class KVArgsLike(Protocol):
    page_size: int

def f():
    parallel, other = get_parallel(), 3
    asked(1, timeout=2)
    return parallel.tp_size, get_parallel().nnodes, KVPoll.Failed, other.no_use
"""
USES = {
    Use("sglang.srt.context", "get_parallel"),
    Use("sglang.srt.context", "KVPoll"),
    Use("sglang.srt.calls", "ask"),
    Use("sglang.srt.context", "get_parallel", "tp_size", is_called=True),
    Use("sglang.srt.context", "get_parallel", "nnodes", is_called=True),
    Use("sglang.srt.context", "KVPoll", "Failed"),
    Use("sglang.srt.calls", "ask", parameters=("timeout",)),
    Use("sglang.srt.queues", "Queue", "put"),
    Use("sglang.srt.calls.ask"),
    Use("sglang.srt.disaggregation.base.conn", "KVArgs", "page_size"),
}
FILES = {
    "context.py": "from sglang.srt.states import *\ndef get_parallel(): ...\n",
    "states.py": "class KVPoll:\n    Failed = 0\n",
    "server_args.py": "class ServerArgs:\n    tp_size: int\n    nnodes: int\n",
    "calls.py": "def ask(what, timeout): return what\n",
    "queues.py": "class Base:\n    def put(self): ...\nclass Queue(Base): ...\n",
    "disaggregation/base/conn.py": "class KVArgs:\n    page_size: int\n",
}


def release(folder: Path, **files: str) -> Release:
    """With these files instead; those of no text are missing."""
    for name, text in (FILES | files).items():
        if text:
            path = folder / "sglang/srt" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return Release(folder)


def test_uses_are_found_in_our_code() -> None:
    assert uses([OUR_CODE]) == USES


def test_a_release_that_has_all_lacks_nothing(tmp_path: Path) -> None:
    has_all = release(tmp_path)
    assert [has_all.lacks(use) for use in sorted(USES)] == [None] * len(USES)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("states.py", "class KVPoll:\n    Fallen = 0\n", "no sglang.srt.context.KVPoll.Failed"),
        ("states.py", "", "no sglang.srt.context.KVPoll"),
        (
            "server_args.py",
            "class ServerArgs:\n    nnodes: int\n",
            "no sglang.srt.context.get_parallel().tp_size",
        ),
        (
            "calls.py",
            "def ask(what): return what\n",
            "sglang.srt.calls.ask has no parameter timeout",
        ),
        (
            "calls.py",
            "def ask(what, timeout): return timeout\n",
            "sglang.srt.calls.ask reads otherwise",
        ),
        ("calls.py", 'def ask(what, timeout):\n    """New words."""\n    return what\n', None),
        ("queues.py", "class Queue: ...\n", "no sglang.srt.queues.Queue.put"),
        (
            "disaggregation/base/conn.py",
            "class KVArgs:\n    ...\n",
            "no sglang.srt.disaggregation.base.conn.KVArgs.page_size",
        ),
    ],
)
def test_what_a_release_lacks_or_has_otherwise(
    tmp_path: Path, name: str, text: str, line: str | None
) -> None:
    known, new = release(tmp_path / "known"), release(tmp_path / "new", **{name: text})
    found = list(changes(known, new, USES))
    assert (line in found) if line is not None else not found


@pytest.mark.slow
def test_our_own_code_uses_what_it_is_known_to_use() -> None:
    found = uses(path.read_text() for path in OURS.rglob("*.py"))
    assert Use("sglang.srt.disaggregation.base.conn", "KVArgs", "kv_layout") in found
    assert Use("sglang.srt.disaggregation.base.conn", "KVPoll", "WaitingForInput") in found
    assert Use("sglang.srt.managers.scheduler", "Scheduler", "run_batch") in found
    assert len(found) > 100


def test_the_program_says_how_much_is_lacking(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for one in ("known", "new"):
        release(tmp_path / one)
    assert main([str(tmp_path / "known"), str(tmp_path / "new")]) == 0
    assert "0 lacking, 0 read otherwise" in capsys.readouterr().out
