# SPDX-License-Identifier: Apache-2.0
"""Calling threads that stand still, or move bytes, hold up nobody else."""

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
from te_built import built_once
from te_frames import Kind, ack
from te_frozen import FrozenMemory, frozen_memory
from te_two_rails import TwoRails

import te

TIMEOUT_S: Final = 60.0
#: Of a process of its own. One of them makes engines forty times, and took 44 s where twenty other
#: processes wanted each processor.
PATIENCE_S: Final = 180.0
#: Far less, and far more than a thread is off its processor.
SOON_S: Final = 20.0
NBYTES: Final = 1 << 12
SOURCE: Final = Path(__file__).with_name("callers.c")
HOOKS: Final = "callers.so"
FAR: Final = 1 << 20
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
DONE, PENDING = te.Status.DONE, te.Status.PENDING


# -- what it does under the link's lock


@contextlib.contextmanager
def two_rails(*memory: Any) -> Iterator[TwoRails]:
    config = te.Config(transports=("tcp",), workers=2, rails=2, **PATIENT)
    with te.Engine(config) as engine:
        for one in memory:
            if isinstance(one, FrozenMemory):
                engine.register(one.address, one.nbytes)
            else:
                engine.register(one)
        with contextlib.closing(TwoRails(engine)) as link:
            yield link


@pytest.mark.userfaultfd
def test_a_write_whose_memory_does_not_answer_holds_up_no_other_connection() -> None:
    """Its owner sends it, in its turn, and waits for a page. The link's lock is for the others."""
    back = np.zeros(NBYTES, np.uint8)
    whole = np.full(NBYTES, 3, np.uint8)
    before = tasks()
    with (
        frozen_memory(NBYTES) as into,
        frozen_memory(NBYTES) as out,
        two_rails(into, out, back) as link,
    ):
        holding = link.peer.read(te.Blocks.of(FAR, into.address, NBYTES))
        held_number, _ = link.take(Kind.READ)
        read = link.peer.read(te.Blocks.of(FAR, back.ctypes.data, NBYTES))
        read_number, _ = link.take(Kind.READ)
        # A worker that has just sent looks for more to send: then the other one would take it.
        await_sleep(before, wakes_by_itself=True)
        # The owner stands still, so that it carries the next command out itself.
        link.reply(0, held_number, into.address, whole.tobytes())
        into.wait_until_touched()
        write = link.peer.write(te.Blocks.of(out.address, FAR, NBYTES))
        into.serve(whole)
        out.wait_until_touched()
        link.reply(1, read_number, back.ctypes.data, whole.tobytes())
        assert read.wait(SOON_S) is DONE
        assert (back == whole).all()
        assert write.poll() is PENDING
        out.serve(whole)
        assert holding.wait(TIMEOUT_S) is DONE
        number, rail = link.take(Kind.SEGMENT)
        rail.sendall(ack(number, 0))
        assert write.wait(TIMEOUT_S) is DONE


# -- where it stands still


def _build(folder: Path) -> None:
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(folder / HOOKS), str(SOURCE)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize(
    "what",
    [
        "a_worker_reads_while_a_caller_goes_to_sleep",
        "a_caller_reads_while_its_worker_stands_still",
        "a_caller_sends_what_it_waits_for",
        "a_link_ends_while_a_caller_sends",
        "a_caller_finds_a_lock_taken",
        "a_read_is_called_off_while_a_caller_lands_it",
        "memory_goes_while_a_caller_lands_in_it",
        "records_come_in_parts",
        "a_peer_answers_without_end",
        "the_worker_of_another_connection_stands_still",
        "what_a_caller_leaves_to_a_worker_that_stands_still",
        "a_peer_takes_more_just_after_it_was_suspected",
        "a_process_stands_still_whose_rail_has_work",
        "a_note_comes_whenever_one_is_taken",
        "a_rail_is_lost_before_its_worker_has_it",
        "a_tag_is_fenced_while_a_link_is_made",
        "a_worker_stands_still_with_a_lock",
        "a_worker_stands_still_with_a_lock_of_rdma",
        "a_worker_stands_still_with_a_lock_of_the_same_host",
    ],
)
def test_a_thread_that_stands_still_loses_nothing_and_keeps_nothing(what: str) -> None:
    preloaded = f"{os.environ.get('LD_PRELOAD', '')} {built_once([SOURCE], _build) / HOOKS}"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("te_put_off.py")), what],
        env={
            **os.environ,
            "LD_PRELOAD": preloaded.strip(),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
