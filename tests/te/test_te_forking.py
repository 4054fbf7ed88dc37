# SPDX-License-Identifier: Apache-2.0
"""What a child of fork(2) lets go."""

from __future__ import annotations

import os

import pytest

from te import forking

pytestmark = pytest.mark.fast


class One:
    """Counts, or fails as what has a descriptor that somebody else has closed."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.calls = 0

    def let_go(self) -> None:
        self.calls += 1
        if self.fails:
            raise OSError(9, "Bad file descriptor")


def test_one_that_fails_keeps_no_other_in_the_child() -> None:
    """In whichever order they come: there is one that fails among the first half."""
    all_ = [One(fails=number % 2 == 0) for number in range(8)]
    for one in all_:
        forking.let_go_in_child(one)
    pid = os.fork()
    if not pid:
        os._exit(sum(one.calls for one in all_))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == len(all_)
    assert not any(one.calls for one in all_), "the parent keeps them"


def test_what_fails_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = One(fails=True)
    monkeypatch.setattr(forking, "_KNOWN", {one})
    forking._let_go()
    assert "Bad file descriptor" in caplog.text
