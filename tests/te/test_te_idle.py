# SPDX-License-Identifier: Apache-2.0
"""An engine that has nothing to do sleeps until something comes, and misses nothing by that."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from te_asleep import await_sleep, tasks
from te_contract import TIMEOUT_S, WAYS, Way, paired
from te_far import wait_until
from te_frames import Kind
from te_two_rails import TwoRails

import te

NBYTES: Final = 4096
FAR: Final = 1 << 20
HASTY: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": 0.5}
DONE, FAILED = te.Status.DONE, te.Status.FAILED


@pytest.mark.parametrize("way", WAYS)
def test_no_thread_wakes_up_without_work(way: Way) -> None:
    before = tasks()
    with paired(way) as pair:
        await_sleep(before)
        for _ in range(2):
            assert pair.write(0, 0, NBYTES).wait(TIMEOUT_S) is DONE
            assert pair.write(0, 0, len(pair.src)).wait(TIMEOUT_S) is DONE
            await_sleep(before)
            assert pair.peer.read(pair.blocks_back(0, 0, NBYTES)).wait(TIMEOUT_S) is DONE
            await_sleep(before)


@contextlib.contextmanager
def asleep() -> Iterator[tuple[TwoRails, np.ndarray]]:
    """A link whose other side is by hand, of an engine that sleeps; and memory of it."""
    memory, before = np.ones(NBYTES, np.uint8), tasks()
    with te.Engine(te.Config(transports=("tcp",), **HASTY)) as engine:
        engine.register(memory)
        with contextlib.closing(TwoRails(engine)) as link:
            await_sleep(before)
            yield link, memory


def test_what_is_sent_in_place_of_a_worker_that_sleeps_has_a_deadline() -> None:
    """Nobody waits for it, who could look instead."""
    with asleep() as (link, memory):
        write = link.peer.write(te.Blocks.of(memory.ctypes.data, FAR, NBYTES))
        link.take(Kind.SEGMENT)
        wait_until(lambda: write.poll() is FAILED, "it is given up")
        assert "no progress for 0.5 s" in str(write.reason)


def test_a_read_of_which_nothing_comes_has_a_deadline() -> None:
    with asleep() as (link, memory):
        read = link.peer.read(te.Blocks.of(FAR, memory.ctypes.data, NBYTES))
        wait_until(lambda: read.poll() is FAILED, "it is given up")
        assert "no progress for 0.5 s" in str(read.reason)


#: Opens a link, leaves its connection to a child, and ends when it is told to.
LEAVING = """
import os, sys
sys.path[:0] = sys.argv[1].split(":")
import te_raw
source = te_raw.RawSource(bytes.fromhex(sys.argv[2]), "samehost")
if os.fork():
    print(flush=True)
    sys.stdin.readline()
    os._exit(0)
os.read(int(sys.argv[3]), 1)
"""


def test_the_end_of_a_process_is_noticed_although_a_child_keeps_the_connection() -> None:
    paths = ":".join([str(Path(te.__file__).parents[1]), str(Path(__file__).parent)])
    stays, leaves = os.pipe()
    before = tasks()
    with te.Engine() as engine:
        arguments = [sys.executable, "-c", LEAVING, paths, engine.card().hex(), str(stays)]
        with subprocess.Popen(
            arguments, pass_fds=[stays], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdout.readline()
                wait_until(lambda: len(engine.links()) == 1, "the link stands")
                await_sleep(before)
                process.stdin.write("go\n")
                process.stdin.flush()
                wait_until(lambda: not engine.links(), "the link has ended")
            finally:
                os.close(leaves)
                os.close(stays)
