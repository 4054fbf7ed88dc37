# SPDX-License-Identifier: Apache-2.0
"""One worker owns each link. Calling threads give it commands, and wait for no lock."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from te_contract import cancel, outcome
from te_far import pattern, wait_until
from te_frozen import FrozenMemory, frozen_memory

import te
from te.core.engine import Engine as Plane
from te.memory_kinds import HOST
from te.transports.tcp._core import TcpLink

TIMEOUT_S: Final = 60.0
NBYTES: Final = 1 << 12
PATIENT: Final[dict[str, Any]] = {"connect_timeout_s": TIMEOUT_S, "stall_timeout_s": TIMEOUT_S}
DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED
#: As long may the quickest of TRIES calls take. None that waits for the worker would end.
AT_ONCE_S: Final = 1e-3
TRIES: Final = 30


class Held:
    """An engine whose only worker waits, in its turn, for a page of what a peer writes; and a link
    of that worker's to another engine."""

    def __init__(self, engine: te.Engine, other: te.Engine, memory: FrozenMemory) -> None:
        self._memory = memory
        self._src = np.array(pattern(1, memory.nbytes))
        self.src, self.dst = np.full(NBYTES, 7, np.uint8), np.zeros(NBYTES, np.uint8)
        self.other = other
        engine.register(memory.address, memory.nbytes, remote="read-write")
        engine.register(self.src, remote="read-write")
        other.register(self._src)
        other.register(self.dst, remote="read-write")
        self.peer = engine.connect(other.card())
        self._holding = other.connect(engine.card()).write(
            te.Blocks.of(self._src.ctypes.data, memory.address, memory.nbytes)
        )
        memory.wait_until_touched()

    def write(self) -> te.Transfer:
        return self.peer.write(te.Blocks.of(self.src.ctypes.data, self.dst.ctypes.data, NBYTES))

    def read(self) -> te.Transfer:
        return self.peer.read(te.Blocks.of(self.dst.ctypes.data, self.src.ctypes.data, NBYTES))

    def let_go(self) -> None:
        self._memory.serve(self._src)
        assert self._holding.wait(TIMEOUT_S) is DONE


@contextlib.contextmanager
def held() -> Iterator[Held]:
    """Over TCP: what comes is received in the worker's turn."""
    config = te.Config(transports=("tcp",), workers=1, **PATIENT)
    with (
        frozen_memory(1 << 16) as memory,
        te.Engine(config) as engine,
        te.Engine(te.Config(transports=("tcp",), **PATIENT)) as other,
    ):
        yield Held(engine, other, memory)


def least_s(call: Callable[[], object]) -> float:
    """The quickest of several calls, as this thread may be off its processor in any of them."""
    taken = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return min(taken)


@pytest.mark.userfaultfd
def test_calls_return_at_once_while_the_worker_is_held() -> None:
    with held() as one:
        transfers: list[te.Transfer] = []
        assert least_s(lambda: transfers.append(one.write())) < AT_ONCE_S
        left = iter(transfers)
        assert least_s(lambda: next(left).poll()) < AT_ONCE_S
        # Which shows that the worker is held: nobody has begun one.
        assert {transfer.poll() for transfer in transfers} == {te.Status.PENDING}
        cancelled = iter(transfers[: TRIES // 2] * 2)
        assert least_s(lambda: next(cancelled).cancel()) < AT_ONCE_S
        with pytest.raises(TimeoutError):
            transfers[-1].wait(0.01)
        one.let_go()
        for i, transfer in enumerate(transfers):
            assert transfer.wait(TIMEOUT_S) is (CANCELLED if i < TRIES // 2 else DONE)
        assert (one.dst == 7).all()


@pytest.mark.userfaultfd
def test_what_was_cancelled_before_its_owner_has_it_moves_nothing() -> None:
    with held() as one:
        transfers = [one.write() for _ in range(5)]
        reads = [one.read() for _ in range(5)]
        for transfer in transfers + reads:
            cancel(transfer)
        one.src[:] = 9
        one.let_go()
        for transfer in transfers + reads:
            assert transfer.wait(TIMEOUT_S) is CANCELLED
        assert one.write().wait(TIMEOUT_S) is DONE
        assert (one.dst == 9).all()
        assert (one.src == 9).all()


@pytest.mark.userfaultfd
def test_what_its_owner_has_not_begun_fails_with_the_link() -> None:
    with held() as one:
        transfers = [one.write() for _ in range(5)] + [one.read() for _ in range(5)]
        transfers[0].cancel()
        one.peer.close()
        transfers.append(transfers[0])
        one.let_go()
        for transfer in transfers:
            assert outcome(transfer) in (FAILED, CANCELLED)
        assert (one.dst == 0).all()


@pytest.mark.slow
@pytest.mark.userfaultfd
def test_a_queue_that_its_owner_does_not_take_from_is_bounded() -> None:
    with held() as one:
        transfers = []
        with contextlib.suppress(te.QueueFull):
            while len(transfers) < 1 << 16:
                transfers.append(one.write())
        transfers[0].cancel()
        with pytest.raises(te.QueueFull):
            one.write()
        one.let_go()
        assert transfers[-1].wait(TIMEOUT_S) is DONE
        assert one.write().wait(TIMEOUT_S) is DONE


# -- who waits for an answer

#: Without spinning: who waits sleeps at once, for 1 ms if nobody wakes him.
SLEEPING: Final[dict[str, Any]] = {"spin_s": 0.0, **PATIENT}
WOKEN_S: Final = 0.8e-3


def seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@contextlib.contextmanager
def answering(config: te.Config) -> Iterator[tuple[te.Peer, Any, Any]]:
    """A peer, and memory of both sides."""
    src, dst = np.full(THREADS * NBYTES, 7, np.uint8), np.zeros(THREADS * NBYTES, np.uint8)
    with te.Engine(config) as source, te.Engine(config) as target:
        source.register(src, remote="read-write")
        target.register(dst, remote="read-write")
        yield source.connect(target.card()), src, dst


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_an_answer_wakes_who_waits_for_it(transport: str, workers: int, verb: str) -> None:
    """Two connections, of one worker or of two; reads go by one after the other."""
    config = te.Config(transports=(transport,), workers=workers, rails=2, **SLEEPING)
    with answering(config) as (peer, src, dst):
        ends = (src, dst) if verb == "write" else (dst, src)
        blocks = te.Blocks.of(ends[0].ctypes.data, ends[1].ctypes.data, NBYTES)
        call = getattr(peer, verb)

        def both_are_quick() -> bool:
            """Where none is woken up none is ever; where all are, threads may wait for a core."""
            taken = [seconds(lambda: call(blocks).wait(TIMEOUT_S)) for _ in range(TRIES)]
            return min(taken[::2]) < WOKEN_S and min(taken[1::2]) < WOKEN_S

        wait_until(both_are_quick, "an answer by each connection wakes who waits for it")


@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_threads_that_wait_on_one_connection_all_get_their_answers(
    transport: str, spin_s: float
) -> None:
    config = te.Config(transports=(transport,), spin_s=spin_s, rails=1, **PATIENT)
    with answering(config) as (peer, src, dst):

        def write(number: int) -> None:
            at = number * NBYTES
            mine, there = src[at:][:NBYTES], dst[at:][:NBYTES]
            for turn in range(2 * ROUNDS):
                mine[:] = turn
                blocks = te.Blocks.of(mine.ctypes.data, there.ctypes.data, NBYTES)
                assert peer.write(blocks).wait(TIMEOUT_S) is DONE
                assert (there == turn).all()

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for ended in [pool.submit(write, number) for number in range(THREADS)]:
                ended.result(TIMEOUT_S)


def test_a_link_without_a_connection_takes_what_it_is_told() -> None:
    """Nobody owns it yet."""
    memory = np.zeros(8, np.uint8)
    plane = Plane(1, 5.0, 1.0, 0.0, 1 << 20, 1020)
    plane.add_region(memory.ctypes.data, memory.ctypes.data + 8, 1, HOST.compiled, 0, False)
    blocks = np.array([(memory.ctypes.data, memory.ctypes.data, 8)], te.BLOCK)
    link = TcpLink(plane, False)
    assert link.send_note(b"early")
    for is_read in (False, True):
        transfer = link.submit(blocks, 8, 0, is_read, 1)
        assert transfer.failure() == link.death
        assert transfer.cancel()
    assert link.tally()[2] == 0
    assert plane.remove_region(1, 1.0) == 0


# -- many threads

THREADS: Final = 4
ROUNDS: Final = 25
SLICE: Final = 1 << 19


class Caller:
    """A thread's own slice of both memories, and its own tags."""

    def __init__(self, number: int, peer: te.Peer, target: te.Engine, src: Any, dst: Any) -> None:
        self._number, self._peer, self._target = number, peer, target
        self._src, self._dst = src, dst
        self._random = np.random.default_rng(number)

    def run(self) -> None:
        for turn in range(ROUNDS):
            tag = self._number << 16 | turn + 1
            self._target.expect(tag)
            self._write(turn, tag)
            self._give_up(turn, tag)
            self._target.fence(tag, TIMEOUT_S)
            # Nothing lands under the tag any more, however late it was cancelled.
            self._dst[:] = 0xEE
            self._read(turn)
            assert (self._dst == 0xEE).all()

    def _blocks(self, nbytes: int) -> te.Blocks:
        return te.Blocks.of(self._src.ctypes.data, self._dst.ctypes.data, nbytes)

    def _write(self, turn: int, tag: int) -> None:
        nbytes = int(self._random.choice([1, NBYTES, 1 << 16, SLICE]))
        self._src[:] = pattern(self._number * ROUNDS + turn, SLICE)
        assert self._peer.write(self._blocks(nbytes), tag).wait(TIMEOUT_S) is DONE
        assert (self._dst[:nbytes] == self._src[:nbytes]).all()

    def _give_up(self, turn: int, tag: int) -> None:
        transfers = [
            self._peer.write(self._blocks(NBYTES if turn % 2 else SLICE), tag) for _ in range(4)
        ]
        if turn % 3 == 0:
            self._target.revoke(tag)
        for transfer in transfers:
            transfer.cancel()
        for transfer in transfers:
            assert outcome(transfer) in (DONE, CANCELLED, FAILED)

    def _read(self, turn: int) -> None:
        back = te.Blocks.of(self._dst.ctypes.data, self._src.ctypes.data, SLICE)
        read = self._peer.read(back)
        if turn % 2:
            assert read.wait(TIMEOUT_S) is DONE
            assert (self._src == 0xEE).all()
        else:
            cancel(read)
            self._src[:] = 0x11
            assert read.wait(TIMEOUT_S) in (DONE, CANCELLED)
            if read.poll() is CANCELLED:
                assert (self._src == 0x11).all()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
@pytest.mark.parametrize("workers", [1, 2])
def test_threads_write_cancel_read_and_fence_on_one_link(transport: str, workers: int) -> None:
    """With two workers the link's second connection is not its owner's."""
    config = te.Config(transports=(transport,), workers=workers, **PATIENT)
    src, dst = (np.zeros(THREADS * SLICE, np.uint8) for _ in range(2))
    with te.Engine(config) as source, te.Engine(config) as target:
        source.register(src)
        target.register(dst, remote="read-tagged")
        peer = source.connect(target.card())
        callers = [
            Caller(i, peer, target, src[i * SLICE :][:SLICE], dst[i * SLICE :][:SLICE])
            for i in range(THREADS)
        ]
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for ended in [pool.submit(one.run) for one in callers]:
                ended.result(TIMEOUT_S)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "samehost"])
def test_threads_that_write_find_their_link_closed(transport: str) -> None:
    config = te.Config(transports=(transport,), **PATIENT)
    src, dst = (np.zeros(SLICE, np.uint8) for _ in range(2))

    def write_until_it_ends(peer: te.Peer, nbytes: int) -> te.Transfer:
        while True:
            transfer = peer.write(te.Blocks.of(src.ctypes.data, dst.ctypes.data, nbytes))
            if outcome(transfer) is not DONE:
                return transfer

    for turn in range(5):
        with te.Engine(config) as source, te.Engine(config) as target:
            source.register(src)
            target.register(dst, remote="read-write")
            peer = source.connect(target.card())
            with concurrent.futures.ThreadPoolExecutor(3) as pool:
                writers = [
                    pool.submit(write_until_it_ends, peer, nbytes) for nbytes in (1, NBYTES, SLICE)
                ]
                time.sleep(0.01 * turn)
                target.close()
                for one in writers:
                    assert one.result(TIMEOUT_S).poll() is FAILED
