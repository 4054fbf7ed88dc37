# SPDX-License-Identifier: Apache-2.0
"""An engine that does not listen."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from te_asleep import await_sleep, tasks
from te_contract import TIMEOUT_S
from te_far import wait_until

import te


def config(transport: str, listens: bool = False) -> te.Config:
    return te.Config(
        transports=(transport,), workers=1, status_dir=None, listens=listens, stall_timeout_s=60.0
    )


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_it_connects_and_has_one_thread_that_sleeps(transport: str) -> None:
    memory, there = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    with te.Engine(config(transport, listens=True)) as other:
        other.register(there, remote="read-write")
        before = tasks()
        with te.Engine(config(transport)) as engine:
            assert len(tasks() - before) == 1
            engine.register(memory, remote="none")
            peer = engine.connect(other.card())
            blocks = te.Blocks.of(memory.ctypes.data, there.ctypes.data, memory.nbytes)
            assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
            assert there.all()
            await_sleep(before)
        engine.close()


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_nobody_can_connect_to_it(transport: str) -> None:
    with te.Engine(config(transport)) as engine:
        with pytest.raises(te.ListenError, match="does not listen"):
            engine.card()
        assert repr(engine).endswith("port 0)")


def test_it_says_which_links_have_ended_when_it_next_connects(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with te.Engine(config("tcp")) as engine, te.Engine(config("tcp", listens=True)) as other:
        with te.Engine(config("tcp", listens=True)) as former:
            peer = engine.connect(former.card())
        with caplog.at_level(logging.INFO, logger="te.connect.accept"):
            wait_until(lambda: not peer.alive, "the link has died")

            def is_told() -> bool:
                engine.connect(other.card())
                return "a link ended" in caplog.text

            wait_until(is_told, "the log says so")
    assert former.id in caplog.text
