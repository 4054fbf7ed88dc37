# SPDX-License-Identifier: Apache-2.0
"""What an owner does from time to time goes on, whatever happens once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from store_makers import TIMEOUT_S, until

from kvstore.owner import ticking as ticking_module
from kvstore.owner.ticking import Ticking


class Owner:
    """Its first tick has a bug."""

    def __init__(self) -> None:
        self.ticks = 0

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == 1:
            raise RuntimeError("on purpose")


def test_a_bug_ends_no_ticks(caplog: pytest.LogCaptureFixture) -> None:
    owner: Any = Owner()
    ticking = Ticking(owner)
    until(lambda: owner.ticks >= 3, "it goes on")
    ticking.close()
    assert not ticking._thread.is_alive()
    assert caplog.text.count("the owner's tick raised") == 1


def test_a_tick_that_stands_still_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticking_module, "CLOSE_TIMEOUT_S", 0.01)
    begun, over = threading.Event(), threading.Event()

    class Slow:
        def tick(self) -> None:
            begun.set()
            over.wait(TIMEOUT_S)

    owner: Any = Slow()
    ticking = Ticking(owner)
    assert begun.wait(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="kvstore-ticks does not end"):
        ticking.close()
    over.set()
    ticking._thread.join(TIMEOUT_S)
    assert not ticking._thread.is_alive()
