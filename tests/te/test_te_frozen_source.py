# SPDX-License-Identifier: Apache-2.0
"""Sources on this host whose memory does not answer: each costs its own link alone."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from te_asleep import TASKS, tasks
from te_far import FarEngine, pattern, wait_until, wait_until_stopped
from te_frames import AckStatus, Kind, descriptors
from te_frozen import FrozenMemory, frozen_memory
from te_host import PAGE, rail_asked, rail_refused
from te_raw import TIMEOUT_S, RawSource, refusal

import te
from te.transports.samehost.messages import Nonce

pytestmark = pytest.mark.userfaultfd

NBYTES: Final = 1 << 16
RUNNERS_MAX: Final = 16  # te/core/sections.pxd
#: What is frozen is not to count as stalled.
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
#: With one worker, which has to be taken over for anything to go on.
LONELY = te.Config(transports=("samehost",), workers=1, **PATIENT)


class Friend:
    """A source that answers, and what it writes to."""

    def __init__(self, target: te.Engine, engine: te.Engine, memory: Any = None) -> None:
        self._src = np.frombuffer(bytearray(NBYTES) if memory is None else memory, np.uint8)
        self._dst = np.zeros(NBYTES, np.uint8)
        engine.register(self._src if memory is None else memory)
        target.register(self._dst, remote="read-write")
        self._peer = engine.connect(target.card())

    def write(self, turn: int, tag: int = 0) -> te.Transfer:
        self._src[:] = pattern(turn, NBYTES)
        blocks = te.Blocks.of(self._src.ctypes.data, self._dst.ctypes.data, NBYTES)
        return self._peer.write(blocks, tag)

    def assert_served(self, turn: int, tag: int = 0) -> None:
        assert self.write(turn, tag).wait(TIMEOUT_S) is te.Status.DONE
        assert (self._dst == pattern(turn, NBYTES)).all()


class Frozen:
    """A source whose write under a tag waits for a page of its memory."""

    TAG = 7

    def __init__(self, target: te.Engine, source: te.Engine, memory: FrozenMemory) -> None:
        self._memory = memory
        self.dst = np.full(memory.nbytes, 0xEE, np.uint8)
        self.source = source
        source.register(memory.address, memory.nbytes)
        self.region = target.register(self.dst, remote="read-write")
        self.peer = source.connect(target.card())
        target.expect(self.TAG)
        blocks = te.Blocks.of(memory.address, self.region.address, memory.nbytes)
        self.transfer = self.peer.write(blocks, tag=self.TAG)
        memory.wait_until_touched()

    def serve(self) -> None:
        self._memory.serve(pattern(3, self._memory.nbytes))


@contextlib.contextmanager
def frozen_source(target: te.Engine) -> Iterator[Frozen]:
    with te.Engine(LONELY) as source, frozen_memory(NBYTES) as memory:
        yield Frozen(target, source, memory)


def test_memory_that_does_not_answer_stops_its_own_link_alone() -> None:
    with te.Engine(LONELY) as target, te.Engine(LONELY) as engine, te.Engine(LONELY) as late:
        friend = Friend(target, engine)
        friend.assert_served(1)
        for turn in range(3):
            with frozen_source(target) as frozen:
                friend.assert_served(2 + turn)
                Friend(target, late).assert_served(5)
                assert frozen.transfer.poll() is te.Status.PENDING
                frozen.serve()
                assert frozen.transfer.wait(TIMEOUT_S) is te.Status.DONE
                assert (frozen.dst == pattern(3, NBYTES)).all()
                assert target.fence(Frozen.TAG, TIMEOUT_S) == 1


def test_a_fence_waits_for_the_copy_that_stands_and_for_no_other() -> None:
    with te.Engine(LONELY) as target, te.Engine(LONELY) as engine:
        friend = Friend(target, engine)
        with frozen_source(target) as frozen:
            target.expect(8)
            friend.assert_served(1, tag=8)  # So the worker has been taken over.
            assert target.fence(8, TIMEOUT_S) == 1
            for _ in range(2):
                with pytest.raises(te.FenceTimeout, match="call fence again"):
                    target.fence(Frozen.TAG, 0.05)
            frozen.serve()
            assert target.fence(Frozen.TAG, TIMEOUT_S) == 0
            frozen.dst[:] = 0xCA
            with pytest.raises(te.TransferFailed, match="the tag 0x7 was fenced"):
                frozen.transfer.wait(TIMEOUT_S)
            friend.assert_served(2)
            assert (frozen.dst == 0xCA).all()


def test_memory_that_nothing_is_copied_to_is_deregistered_meanwhile() -> None:
    with te.Engine(LONELY) as target, te.Engine(LONELY) as engine:
        friend = Friend(target, engine)
        other = np.zeros(NBYTES, np.uint8)
        region = target.register(other, remote="read-write")
        with frozen_source(target) as frozen:
            friend.assert_served(1)  # So the worker has been taken over.
            target.deregister(region)
            with pytest.raises(te.FenceTimeout, match="call deregister again"):
                target.deregister(frozen.region, 0.05)
            frozen.serve()
            target.deregister(frozen.region, TIMEOUT_S)


def test_a_link_whose_copy_stands_for_too_long_has_died() -> None:
    impatient = te.Config(transports=("samehost",), workers=1, stall_timeout_s=0.5)
    with te.Engine(impatient) as target, te.Engine(LONELY) as engine:
        friend = Friend(target, engine)
        with frozen_source(target) as frozen:
            with pytest.raises(te.TransferFailed):
                frozen.transfer.wait(TIMEOUT_S)
            friend.assert_served(1)
            for _ in range(2):  # It has not ended: what it copies may still land.
                with pytest.raises(te.FenceTimeout):
                    target.fence(frozen.TAG, 0.05)
            frozen.serve()
            assert target.fence(frozen.TAG, TIMEOUT_S) == 0
            frozen.dst[:] = 0xCA
            friend.assert_served(2)
            assert (frozen.dst == 0xCA).all()


def test_closing_beside_a_copy_that_stands_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    target = te.Engine(LONELY)
    with te.Engine(LONELY) as engine:
        friend = Friend(target, engine)
        with frozen_source(target) as frozen:
            friend.assert_served(1)
            with monkeypatch.context() as short:
                short.setattr("te.engine.CLOSE_TIMEOUT_S", 0.5)
                for _ in range(2):
                    with pytest.raises(te.FenceTimeout, match="call close again"):
                        target.close()
            with pytest.raises(te.TransferFailed):  # Its connections were closed.
                friend.write(2).wait(TIMEOUT_S)
            frozen.serve()
            target.close()


def threads_of(worker: str, earlier: set[int]) -> int:
    """How many threads of this process have that name, without those: a thread of an engine that
    is closed may be about to end."""
    found = 0
    for task in tasks() - earlier:
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            found += (TASKS / str(task) / "comm").read_text().strip() == worker
    return found


def test_threads_that_wait_are_bounded_and_mapped_memory_needs_none() -> None:
    """More sources than there are threads: the last of them wait without one."""
    count, earlier = RUNNERS_MAX + 4, tasks()

    def threads() -> int:
        return threads_of("te-worker-0", earlier)

    with (
        te.Engine(te.Config(transports=("samehost",), workers=1, **PATIENT)) as target,
        te.Engine(te.Config(transports=("samehost",), workers=2, **PATIENT)) as engine,
        contextlib.ExitStack() as undo,
    ):
        wait_until(lambda: threads() == 2, "both engines' workers run")
        dst = np.zeros(count * PAGE, np.uint8)
        region = target.register(dst, remote="read-write")
        mapped, plain = Friend(target, engine, te.allocate(NBYTES)), Friend(target, engine)
        mapped.assert_served(1)
        plain.assert_served(1)
        memory = undo.enter_context(frozen_memory(count * PAGE))
        sources = [RawSource(target.card(), "samehost") for _ in range(count)]
        for i, source in enumerate(sources):
            undo.enter_context(source.sock)
            block = (memory.address + i * PAGE, region.address + i * PAGE, PAGE)
            source.send(descriptors(Kind.PULL, 1, [block]))
        wait_until(lambda: threads() == RUNNERS_MAX + 1, "all wait")
        for turn in range(20):
            mapped.assert_served(turn)
        late = plain.write(99)
        assert threads() == RUNNERS_MAX + 1
        memory.serve(pattern(4, count * PAGE))
        for source in sources:
            assert source.ack().status is AckStatus.LANDED
        assert (dst == pattern(4, count * PAGE)).all()
        assert late.wait(TIMEOUT_S) is te.Status.DONE
        wait_until(lambda: threads() <= 3, "they have ended")


def test_greetings_do_not_wait_for_memory_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the interpreter."""
    monkeypatch.setattr("te.transports.samehost.reach.LOOK_TIMEOUT_S", TIMEOUT_S)
    with (
        te.Engine(LONELY) as target,
        te.Engine(LONELY) as engine,
        frozen_memory(PAGE) as memory,
        contextlib.ExitStack() as undo,
    ):
        card, nonce = target.card(), Nonce(memory.address, bytes(16))
        asked = [undo.enter_context(rail_asked(card, nonce=nonce)) for _ in range(20)]
        memory.wait_until_touched()
        Friend(target, engine).assert_served(1)
        asked.pop().close()
        memory.serve(np.ones(PAGE, np.uint8))
        for sock in asked:
            assert "is not the one that greets" in refusal(sock).reason


#: It stops while it looks into memory, which is served some time after it goes on.
STANDS_STILL = """
import os, signal, sys, threading
import numpy as np
from te_frozen import frozen_memory
from te.transports.samehost._core import read_process

given_up = threading.Event()
with frozen_memory(4096) as memory:
    def stand():
        memory.wait_until_touched()
        os.kill(os.getpid(), signal.SIGSTOP)
        given_up.wait(0.3)
        memory.serve(np.ones(4096, np.uint8))

    threading.Thread(target=stand).start()
    try:
        print(*read_process(os.getpid(), memory.address, 4, float(sys.argv[1])))
    finally:
        given_up.set()
"""


@pytest.mark.slow
def test_time_in_which_a_process_stands_still_is_no_silence_of_what_it_looks_into() -> None:
    """Else a machine that was busy for a second has its engines talk by TCP from then on."""
    timeout_s = 4.0  # Far more than its thread takes to serve the memory once the process runs.
    with subprocess.Popen(
        [sys.executable, "-c", STANDS_STILL, str(timeout_s)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        try:
            # Not waitid(2): the thread that waits for the page does not stop with the others.
            wait_until_stopped(process.pid)
            until_s = time.monotonic() + 1.1 * timeout_s
            wait_until(lambda: time.monotonic() > until_s, "the time of the look is over")
            process.send_signal(signal.SIGCONT)
            assert process.communicate(timeout=TIMEOUT_S)[0] == "1 1 1 1\n"
        finally:
            process.kill()


def test_memory_that_does_not_answer_keeps_no_other_process_off_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that look are left behind, a few for each process: then it is not looked into until
    they are back."""
    monkeypatch.setattr("te.transports.samehost.reach.LOOK_TIMEOUT_S", 0.01)
    with te.Engine(LONELY) as target, frozen_memory(PAGE) as memory:
        card, nonce = target.card(), Nonce(memory.address, bytes(16))
        reasons = [rail_refused(card, nonce=nonce) for _ in range(20)]
        assert all("its memory does not answer" in reason for reason in reasons)
        assert ["nor did it before" in reason for reason in reasons] == [False] * 4 + [True] * 16
        monkeypatch.setattr("te.transports.samehost.reach.LOOK_TIMEOUT_S", TIMEOUT_S)
        far = FarEngine(transports=["samehost"], **PATIENT)
        try:
            far.connect(card=base64.b64encode(card).decode())
        finally:
            far.end()
        memory.serve(np.ones(PAGE, np.uint8))
        wait_until(
            lambda: "is not the one that greets" in rail_refused(card, nonce=nonce),
            "they are back",
        )
