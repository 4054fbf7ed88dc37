# SPDX-License-Identifier: Apache-2.0
"""Memory of a client that its engine does not let go of at once, and an engine that is made late,
or cannot be."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import te
from kvstore.client.memory import Memory


class Engine:
    """One that may refuse memory."""

    def __init__(self, takes: bool) -> None:
        self.takes, self.closed = takes, 0

    def register(self, *_: Any, **__: Any) -> str:
        if not self.takes:
            raise te.RegistrationError("no memory can be locked")
        return "a region"

    def close(self) -> None:
        self.closed += 1


def test_an_engine_that_does_not_take_the_memory_is_closed() -> None:
    """The next attempt makes another one."""
    made: list[Any] = [Engine(False), Engine(True)]
    todo = iter(made)
    memory = Memory(lambda: next(todo))
    memory.register(np.zeros(4096, np.uint8))
    with pytest.raises(te.RegistrationError, match="locked"):
        _ = memory.engine
    assert not memory.has_engine
    assert made[0].closed == 1
    assert memory.engine == made[1]
    memory.close()
    assert made[1].closed == 1


def test_behind_the_end_no_engine_is_made() -> None:
    """A thread that is late would leave one, with its threads and its port."""
    made: list[Any] = []
    memory = Memory(lambda: made.append(1) or Engine(True))  # type: ignore[func-returns-value, arg-type, return-value]
    memory.close()
    with pytest.raises(te.ClosedError):
        _ = memory.engine
    assert not made


def test_the_end_waits_for_an_engine_that_is_being_made() -> None:
    """And closes it."""
    engine: Any = Engine(True)
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        assert go_on.wait(30)
        return engine

    memory = Memory(make)
    threads = [threading.Thread(target=lambda: memory.engine)]
    threads[0].start()
    assert begun.wait(30)
    threads.append(threading.Thread(target=memory.close))
    threads[1].start()
    go_on.set()
    for one in threads:
        one.join()
    assert engine.closed == 1


def test_who_gets_does_not_wait_for_an_engine_that_is_being_made() -> None:
    """Registering much memory takes seconds. Each get asks how memory is."""
    begun, go_on = threading.Event(), threading.Event()

    def make() -> Any:
        begun.set()
        assert go_on.wait(30)
        return Engine(True)

    memory, answers = Memory(make), list[bool]()
    memory.register(np.zeros(4096, np.uint8))
    threads = [threading.Thread(target=lambda: memory.engine)]
    threads.append(threading.Thread(target=lambda: answers.append(memory.has_unreadable)))
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    threads[1].join(25)
    is_answered = not threads[1].is_alive()
    go_on.set()
    for one in threads:
        one.join()
    assert is_answered
    assert answers == [False]


def test_memory_that_was_there_before_its_engine_can_be_deregistered_at_a_second_try() -> None:
    """Its engine may refuse while transfers read from it, and knows it by another region."""
    with te.Engine(te.Config(transports=("tcp",), status_dir=None)) as engine:
        memory, array = Memory(lambda: engine), np.zeros(4096, np.uint8)
        region = memory.register(array)
        assert memory.engine is engine
        real = te.Engine.deregister

        def refuses(self: te.Engine, region: te.Region) -> None:
            raise te.RegistrationError("1 unfinished transfers read from the region")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(te.Engine, "deregister", refuses)
            with pytest.raises(te.RegistrationError, match="unfinished"):
                memory.deregister(region)
        assert te.Engine.deregister is real
        memory.deregister(region)
        engine.register(array)
