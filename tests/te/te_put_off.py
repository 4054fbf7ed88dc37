# SPDX-License-Identifier: Apache-2.0
"""A process whose threads stand still where they seldom would, by ``callers.c``: for tests that
start it with the name of one of the functions. It ends well, or says what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

import numpy as np
from te_asleep import await_sleep, tasks
from te_direct import NullEngine, RawDirectSource, ask, word
from te_far import is_readable, wait_until
from te_frames import (
    BLOCK,
    HEADER,
    LANDING,
    REPLY,
    AckStatus,
    Kind,
    ack,
    end,
    header,
    note,
    segment,
    trailer,
)
from te_raw import RawListener, RawSource, read_exactly
from te_two_rails import TwoRails

import te
from te.transports.rdma._core import RdmaLink
from te.transports.tcp import kernel_tls
from te_bench._null import Wires

TIMEOUT_S: Final = 30.0
FAR: Final = 1 << 20
NBYTES: Final = 1 << 12
#: Far more than the kernel keeps for a peer that reads nothing.
MUCH: Final = 1 << 25
#: The clock of the workers stands while the far side by hand, which may be slow, has to answer.
STALL_S: Final = 1.0
LONGER_S: Final = 2 * STALL_S
#: More than there is between two looks at deadlines.
CHECK_S: Final = 0.3
#: Of a transfer that callers leave to workers; and of a read for which a peer is asked in two
#: frames, which one may answer.
LARGE: Final = 1 << 21
WORKERS: Final = 1 << 21
#: Of a write that a caller sends itself if it waits for it, and else leaves to workers.
AWAITED: Final = 1 << 20
#: More than a worker takes from a link's beginning to the end of its first transfers.
LOCKS: Final = 40
WC_RETRY_EXC_ERR: Final = 12  # ibv_poll_cq(3): nobody answers at the other end
#: Who waits sleeps at once, if nothing is there.
CONFIG: Final = te.Config(
    transports=("tcp",),
    workers=1,
    rails=1,
    spin_s=0.0,
    connect_timeout_s=TIMEOUT_S,
    stall_timeout_s=2 * TIMEOUT_S,
)
_hooks: Final = ctypes.CDLL(None)


def number(name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(_hooks, name)


def stop_clock(at_s: float) -> None:
    """That of the workers."""
    ctypes.c_long.in_dll(_hooks, "clock_stands_ns").value = round(at_s * 1e9)


def start_clock() -> None:
    stop_clock(0.0)


@contextlib.contextmanager
def doing_between(what: Callable[[], None]) -> Iterator[None]:
    """Does that whenever this thread, with the interpreter lock, gives back another lock."""
    between = ctypes.c_void_p.in_dll(_hooks, "between")
    called = ctypes.CFUNCTYPE(None)(what)
    between.value = ctypes.cast(called, ctypes.c_void_p).value
    try:
        yield
    finally:
        between.value = None


def write_for_ever(peer: te.Peer, src: Any) -> te.Transfer:
    """Nobody answers it."""
    return peer.write(te.Blocks.of(src.ctypes.data, FAR, src.nbytes))


def wait_in_vain(transfer: te.Transfer, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        transfer.wait(timeout_s)
        raise AssertionError(transfer)


def wait_a_moment(transfer: te.Transfer, timeout_s: float) -> None:
    """Who may answer it stands still, or does not."""
    with contextlib.suppress(TimeoutError):
        transfer.wait(timeout_s)


def a_worker_reads_while_a_caller_goes_to_sleep() -> None:
    """The whole reply to a read is there when its worker takes the payload, and the trailer with
    it: nothing more comes. Meanwhile a caller looks in vain for the worker's turn."""
    src, dst = np.zeros(NBYTES, np.uint8), np.zeros(WORKERS, np.uint8)
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(src)
        engine.register(dst)
        peer, sock = listener.connect(engine)

        def answer_reads() -> None:
            asked = 0
            while data := read_exactly(sock, HEADER.size):
                kind, _, _, count, transfer, _, nbytes, _ = HEADER.unpack(data)
                if kind == Kind.SEGMENT:
                    read_exactly(sock, LANDING.itemsize * count + nbytes + len(trailer()))
                elif kind == Kind.READ:
                    read_exactly(sock, BLOCK.itemsize * count)
                    asked += nbytes
                    if asked == WORKERS:
                        sock.sendall(reply_to(transfer, dst, 9, 1))

        threading.Thread(target=answer_reads, daemon=True).start()
        write = write_for_ever(peer, src)
        wait_in_vain(write, 0.01)
        number("holds_readers").value = 1
        read = peer.read(te.Blocks.of(FAR, dst.ctypes.data, WORKERS))
        wait_until(lambda: number("workers_reading").value, "the worker reads")
        number("puts_caller_off").value = 1
        while not number("callers_put_off").value:
            wait_in_vain(write, 0.01)  # The time may be over before it has looked.
        assert number("callers_put_off").value == 1
        assert read.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()


def a_caller_reads_while_its_worker_stands_still() -> None:
    """It asks, lands what comes, however that is cut, and answers."""
    dst, before = np.zeros(NBYTES, np.uint8), tasks()
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(dst)
        peer, sock = listener.connect(engine)
        await_sleep(before)
        number("holds_next_worker").value = 1
        for turn, cut in enumerate((-1, 1, HEADER.size, HEADER.size + 20, 1000), 1):
            read = peer.read(te.Blocks.of(FAR, dst.ctypes.data, NBYTES))
            assert read_exactly(sock, HEADER.size + BLOCK.itemsize) is not None
            reply = reply_to(turn, dst, turn)
            sock.sendall(reply[:cut])
            wait_in_vain(read, 0.01)
            sock.sendall(reply[cut:])
            wait_for_caller(read)
            assert read.wait(0.0) is te.Status.DONE
            assert (dst == turn).all()
            assert take_ack(sock) == (turn, AckStatus.LANDED)
        number("goes_on").value = 1


def a_caller_sends_what_it_waits_for() -> None:
    """In one frame, while its worker stands still. What the connection does not take at once is the
    worker's."""
    src, before = np.arange(AWAITED, dtype=np.uint8), tasks()
    for room in (0, 1 << 12):
        config = replace(CONFIG, socket_buffer_bytes=room)
        with RawListener("tcp") as listener, te.Engine(config) as engine:
            engine.register(src)
            peer, sock = listener.connect(engine)
            await_sleep(before)
            number("goes_on").value, number("holds_next_worker").value = room, not room
            blocks = te.Blocks.of(src.ctypes.data, FAR, AWAITED)
            write = peer.write(blocks, is_awaited=True)
            frame = read_exactly(sock, HEADER.size + LANDING.itemsize + AWAITED + len(trailer()))
            assert frame is not None
            assert frame[HEADER.size + LANDING.itemsize : -len(trailer())] == src.tobytes()
            sock.sendall(ack(1, AckStatus.LANDED))
            wait_for_caller(write)
            assert write.poll() is te.Status.DONE
            number("goes_on").value = 1


def a_link_ends_while_a_caller_sends() -> None:
    """The peer has reset the connection, and the worker stands still that would see it first."""
    src, before = np.zeros(AWAITED, np.uint8), tasks()
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(src)
        peer, sock = listener.connect(engine)
        await_sleep(before)
        number("goes_on").value, number("holds_next_worker").value = 0, 1
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        wait_until(lambda: number("workers_held").value, "the worker stands still")
        write = peer.write(te.Blocks.of(src.ctypes.data, FAR, AWAITED), is_awaited=True)
        number("goes_on").value = 1
        wait_until(lambda: write.poll() is te.Status.FAILED, "the write has failed")
        assert "Connection reset by peer" in str(write.reason), write.reason


def a_caller_finds_a_lock_taken() -> None:
    """Each in turn that it tries to take while it reads: its worker goes on with what it has begun.
    What is sent elsewhere than the read asked for is refused."""
    dst = np.zeros((2, NBYTES), np.uint8)
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(dst)
        peer, sock = listener.connect(engine)
        for turn, place in itertools.product(range(1, LOCKS), range(2)):
            transfer = 2 * turn - 1 + place
            number("goes_on").value, number("holds_next_worker").value = 0, 1
            number("fails_lock").value = turn
            read = peer.read(te.Blocks.of(FAR, dst[0].ctypes.data, NBYTES))
            assert read_exactly(sock, HEADER.size + BLOCK.itemsize) is not None
            sock.sendall(reply_to(transfer, dst[place], turn))
            wait_for_caller(read, loses_locks=True)
            assert turn > 1 or not number("fails_lock").value
            number("goes_on").value = 1
            status = AckStatus.REFUSED if place else AckStatus.LANDED
            assert take_ack(sock) == (transfer, status)
            assert read.poll() is (te.Status.FAILED if place else te.Status.DONE)
            assert (dst[0] == turn).all()
            assert not dst[1].any()
        assert peer.alive


def a_read_is_called_off_while_a_caller_lands_it() -> None:
    call_while_a_caller_lands(lambda _, read, __: read.cancel(), te.Status.CANCELLED)


def memory_goes_while_a_caller_lands_in_it() -> None:
    def deregister(engine: te.Engine, _: te.Transfer, region: te.Region) -> None:
        engine.deregister(region, TIMEOUT_S)

    call_while_a_caller_lands(deregister, te.Status.FAILED)


def call_while_a_caller_lands(
    call: Callable[[te.Engine, te.Transfer, te.Region], None], outcome: te.Status
) -> None:
    """The call waits for the landing under way. What comes later is thrown away, by a caller that
    waits for another read, and the peer is told."""
    dst, other, half = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8), NBYTES // 2
    before = tasks()
    with (
        RawListener("tcp") as listener,
        te.Engine(CONFIG) as engine,
        ThreadPoolExecutor(2) as pool,
    ):
        region = engine.register(dst)
        engine.register(other)
        peer, sock = listener.connect(engine)
        await_sleep(before)
        number("holds_next_worker").value = 1

        def meanwhile() -> np.ndarray[Any, Any]:
            wait_until(lambda: number("caller_is_held").value, "a caller lands")
            called = pool.submit(call, engine, read, region)
            time.sleep(0.05)
            is_early = called.done()
            number("holds_caller").value = 0
            assert not is_early
            called.result(TIMEOUT_S)
            return dst.copy()

        read = peer.read(te.Blocks.of(FAR, dst.ctypes.data, NBYTES))
        assert read_exactly(sock, HEADER.size + BLOCK.itemsize) is not None
        number("holds_caller").value = 1
        reply = reply_to(1, dst, 1)
        cut = len(reply) - len(trailer()) - half
        sock.sendall(reply[:cut])
        landed = pool.submit(meanwhile)
        wait_for_caller(read)
        assert read.poll() is outcome
        sock.sendall(reply[cut:])
        again = peer.read(te.Blocks.of(FAR, other.ctypes.data, NBYTES))
        sock.sendall(reply_to(2, other, 2))
        wait_for_caller(again)
        number("goes_on").value = 1
        assert again.poll() is te.Status.DONE
        assert (other == 2).all()
        frames = [take_frame(sock) for _ in range(3)]  # One is the question of the second read.
        told = {transfer: status for kind, status, transfer in frames if kind == Kind.ACK}
        assert told == {1: AckStatus.REFUSED, 2: AckStatus.LANDED}
        assert (landed.result(TIMEOUT_S) == dst).all()
        assert (dst[:half] == 1).all()
        assert not dst[half:].any()


def records_come_in_parts() -> None:
    """A caller finds a part of an encrypted record, and leaves some that it has read already: of
    the replies to another thread, which waits for none of them."""
    config = replace(CONFIG, keys=(bytes(range(32)),), encrypt=True)
    kernel_tls.problem = lambda: "te's own records are tested"
    src = np.arange(WORKERS // 8, dtype=np.uint64).view(np.uint8)
    with te.Engine(config) as source, te.Engine(config) as target, ThreadPoolExecutor(1) as pool:
        target.register(src, remote="read")
        peer = source.connect(target.card())

        def read(into: np.ndarray[Any, Any], nbytes: int, at: int) -> te.Transfer:
            into[:] = 0
            return peer.read(te.Blocks.of(src.ctypes.data + at, into.ctypes.data, nbytes))

        def read_and_look(turns: int) -> None:
            for at in range(turns):
                one = read(others, NBYTES, at)
                wait_until(lambda one=one: one.poll() is not te.Status.PENDING, "it is read")
                assert (others[:NBYTES] == src[at : at + NBYTES]).all()

        own, others = np.zeros(WORKERS, np.uint8), np.zeros(NBYTES, np.uint8)
        source.register(own)
        source.register(others)
        number("caller_receives").value = 999
        looking = pool.submit(read_and_look, 100)
        for at in range(50):
            for nbytes in (1, NBYTES, 70_000, WORKERS // 2):
                assert read(own, nbytes, at).wait(TIMEOUT_S) is te.Status.DONE
                assert (own[:nbytes] == src[at : at + nbytes]).all()
                assert not own[nbytes:].any()
        looking.result(TIMEOUT_S)
        assert number("calls_cut_short").value > 100


def reply_to(transfer: int, to: Any, byte: int, number: int = 0) -> bytes:
    """The whole reply to a read of a peer by hand, of the read's number or another one."""
    landings = [(to.ctypes.data, to.nbytes)]
    head = segment(number or transfer, transfer, landings, to.nbytes, flags=REPLY)
    return head + bytes([byte]) * to.nbytes + trailer()


def wait_for_caller(transfer: te.Transfer, *, loses_locks: bool = False) -> None:
    """A calling thread looks for a few milliseconds at a time; once it has lost a lock the worker
    goes on."""

    def is_over() -> bool:
        with contextlib.suppress(te.TransferFailed):
            wait_a_moment(transfer, 0.01)
        if loses_locks and not number("fails_lock").value:
            number("goes_on").value = 1
        return transfer.poll() is not te.Status.PENDING

    wait_until(is_over, "it is over")


def take_ack(sock: Any) -> tuple[int, int]:
    """The transfer and what is said of it."""
    kind, status, transfer = take_frame(sock)
    assert kind == Kind.ACK
    return transfer, status


def take_frame(sock: Any) -> tuple[int, int, int]:
    """The kind, status and transfer of a READ or an ACK."""
    data = read_exactly(sock, HEADER.size)
    assert data is not None
    kind, status, _, count, transfer, _, _, _ = HEADER.unpack(data)
    assert kind in (Kind.READ, Kind.ACK)
    assert read_exactly(sock, count * (BLOCK.itemsize if kind == Kind.READ else 1)) is not None
    return kind, status, transfer


def a_peer_answers_without_end() -> None:
    src = np.zeros(NBYTES, np.uint8)
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(src)
        peer, _ = listener.connect(engine)
        # Of a transfer that is not known any more: that is no violation.
        late = header(Kind.ACK, status=AckStatus.PROGRESS, transfer=1 << 40, nbytes=1)
        (ctypes.c_char * len(late)).in_dll(_hooks, "flood").raw = late
        number("flood_nbytes").value = len(late)
        number("is_flooded").value = 1
        wait_in_vain(write_for_ever(peer, src), 0.01)
        assert peer.alive
        number("is_flooded").value = 0


def the_worker_of_another_connection_stands_still() -> None:
    """What the first transfer waits for has come there long before it is a stall."""
    config = replace(CONFIG, workers=2, rails=2, stall_timeout_s=STALL_S)
    dst = np.zeros(NBYTES, np.uint8)
    stop_clock(time.monotonic())
    with te.Engine(config) as engine, contextlib.closing(TwoRails(engine)) as link:
        engine.register(dst)
        number("holds_readers").value = 1
        read = link.peer.read(te.Blocks.of(FAR, dst.ctypes.data, NBYTES))
        transfer, _ = link.take(Kind.READ)
        link.reply(1, transfer, dst.ctypes.data, bytes([9]) * NBYTES)
        wait_until(lambda: number("workers_reading").value, "the second connection's worker reads")
        start_clock()
        time.sleep(LONGER_S)
        number("holds_readers").value = 0
        assert read.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()


def what_a_caller_leaves_to_a_worker_that_stands_still() -> None:
    """A calling thread finds the reply to the first transfer where it looks for its own answer, and
    leaves it. The connection was not looked at by that, for however long its worker takes."""
    config = replace(
        CONFIG, workers=2, rails=2, stall_timeout_s=STALL_S, socket_buffer_bytes=1 << 12
    )
    src, dst = np.zeros(1 << 18, np.uint8), np.zeros((2, WORKERS), np.uint8)
    before = tasks()
    stop_clock(time.monotonic())
    with (
        te.Engine(config) as engine,
        contextlib.closing(TwoRails(engine)) as link,
        ThreadPoolExecutor(1) as pool,
    ):
        engine.register(src)
        engine.register(dst)
        owners, others = link.rails
        reads, numbers = [], []
        for one in dst:
            reads.append(link.peer.read(te.Blocks.of(FAR, one.ctypes.data, WORKERS)))
            link.take(Kind.READ)
            numbers.append(link.take(Kind.READ)[0])
        # A worker that has just sent looks for more to send: then the second one would take it.
        await_sleep(before, wakes_by_itself=True)
        large = write_for_ever(link.peer, src)
        assert is_readable(owners, TIMEOUT_S)
        # While the owner's connection is busy the other one takes it, and so brings its answer.
        small = write_for_ever(link.peer, src[:NBYTES])
        small_number, _ = link.take(Kind.SEGMENT, others)
        owners.sendall(ack(link.take(Kind.SEGMENT, owners)[0], AckStatus.LANDED))
        assert large.wait(TIMEOUT_S) is te.Status.DONE
        link.reply(0, numbers[1], dst[1].ctypes.data, bytes([9]) * WORKERS)
        assert reads[1].wait(TIMEOUT_S) is te.Status.DONE
        number("holds_next_worker").value = 1
        reply = bytes([9]) * WORKERS
        sent = pool.submit(link.reply, 1, numbers[0], dst[0].ctypes.data, reply)
        wait_until(lambda: number("workers_held").value, "the second connection's worker stands")
        start_clock()
        until_s = time.monotonic() + LONGER_S
        while time.monotonic() < until_s:
            wait_in_vain(small, 0.01)
        number("goes_on").value = 1
        sent.result(TIMEOUT_S)
        others.sendall(ack(small_number, AckStatus.LANDED))  # Behind the reply.
        assert reads[0].wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()
        assert small.wait(TIMEOUT_S) is te.Status.DONE


def a_peer_takes_more_just_after_it_was_suspected() -> None:
    """Nobody has told this side that there is room; it is tried once more before the link ends."""
    config = replace(CONFIG, stall_timeout_s=STALL_S, socket_buffer_bytes=1 << 16)
    src = np.zeros(MUCH, np.uint8)
    with RawListener("tcp") as listener, te.Engine(config) as engine:
        engine.register(src)
        peer, sock = listener.connect(engine)
        number("holds_senders").value = 1
        write = write_for_ever(peer, src)
        wait_until(lambda: number("senders_held").value, "the peer is suspected")
        stop_clock(time.monotonic() + CHECK_S)  # Of the next look at deadlines, and of no other.
        left, transfer = MUCH, 0
        while left:
            data = read_exactly(sock, HEADER.size)
            assert data is not None
            _, _, _, count, transfer, _, nbytes, _ = HEADER.unpack(data)
            number("holds_senders").value = 0
            behind = LANDING.itemsize * count + nbytes + len(trailer())
            assert read_exactly(sock, behind) is not None
            left -= nbytes
        sock.sendall(ack(transfer, AckStatus.LANDED))
        assert write.wait(TIMEOUT_S) is te.Status.DONE


def a_process_stands_still_whose_rail_has_work() -> None:
    """The time in which it did, and its device told it nothing, is no silence of the rail."""
    wires, memory = Wires(), np.zeros((2, NBYTES), np.uint8)
    config = {"spin_s": 0.0, "rail_timeout_s": TIMEOUT_S, "stall_timeout_s": 2 * TIMEOUT_S}
    with NullEngine(wires, 1, **config) as source, NullEngine(wires, 1) as target:
        source.register(memory[0])
        target.register(memory[1], remote="read-write")
        peer = source.connect(target.card())
        wires.hold(True)
        write = peer.write(te.Blocks.of(memory[0].ctypes.data, memory[1].ctypes.data, NBYTES))
        wait_until(lambda: peer.stats().rails[0].state == "suspect", "the rail is suspected")
        number("stood_still_s").value = round(10 * TIMEOUT_S)
        before = number("sleeps_over").value
        wait_until(lambda: number("sleeps_over").value > before + 20, "it was looked at often")
        wires.hold(False)
        assert write.wait(TIMEOUT_S) is te.Status.DONE
        assert peer.stats().rails[0].reason == ""


def a_rail_is_lost_before_its_worker_has_it() -> None:
    """Its source has connected it, used it and given it up while the worker stood still: nothing
    more lands by it."""
    wires, before = Wires(), tasks()
    with (
        NullEngine(wires, 1, spin_s=0.0) as engine,
        contextlib.closing(RawDirectSource(engine.card(), wires)) as source,
    ):
        await_sleep(before)  # Else it may look once more before it is asked.
        number("holds_next_look").value = 1
        engine.expect(1)
        source.send(ask(1, 1, tag=1))
        source.granted()
        wait_until(lambda: number("workers_held").value, "the worker stands")
        pair = source.rail()
        assert pair is not None
        source.send(word(Kind.RAIL_LOST, 0, 1, []))
        number("goes_on").value = 1
        assert source.await_frame(Kind.RAIL_CLOSED).tag == 1
        pair.send_marks([0])
        assert [status for status, _ in pair.poll()] == [WC_RETRY_EXC_ERR]


def a_tag_is_fenced_while_a_link_is_made() -> None:
    """One for all engines, under which a peer may write: the owners of all links are told, that of
    the new one, too."""
    wires = Wires()
    with (
        NullEngine(wires, 1) as engine,
        contextlib.closing(RawDirectSource(engine.card(), wires)) as source,
    ):
        assert source.rail() is not None
        tags, fences = list(range(1, 9)), []
        for tag in tags:
            engine.expect(tag)
            source.send(ask(tag, 1, tag=tag))
            source.granted()

        def fence() -> None:
            if tags:
                fences.append(engine.revoke(tags.pop()))
                fences[-1].poll()

        with doing_between(fence):
            link = RdmaLink(engine._plane, True)
        assert fences
        assert link.alive
        for one in fences:
            assert one.wait(TIMEOUT_S) == 0


def a_note_comes_whenever_one_is_taken() -> None:
    """They wait for the next call."""
    with te.Engine(CONFIG) as engine:
        source = RawSource(engine.card(), "tcp")
        numbers = itertools.count(1)

        def send() -> None:
            turn = next(numbers)
            source.send(note(turn, b"%d" % turn), end(turn))
            source.ack()  # Of what comes behind the note.

        def send_more() -> None:
            if next(more, False):
                send()

        more = iter([True] * 50)
        for _ in range(3):
            send()
        with source.sock, doing_between(send_more):
            taken = engine.take_notes()
        assert [one.data for one in taken] == [b"1", b"2", b"3"]
        assert engine.take_notes()[0].data == b"4"


class Pair:
    """Two engines of this process, and a peer of the first that stands for the second."""

    def __init__(self, source: te.Engine, target: te.Engine) -> None:
        self.source, self.target = source, target
        self._src, self._dst = np.full(LARGE, 7, np.uint8), np.zeros(LARGE, np.uint8)
        self._back = np.zeros(LARGE, np.uint8)
        source.register(self._src)
        source.register(self._back)
        target.register(self._dst, remote="read-write")
        self.peer = source.connect(target.card())
        self.told: queue.SimpleQueue[te.Transfer] = queue.SimpleQueue()
        self._transfers = 0

    def write(self, nbytes: int, tag: int = 0) -> te.Transfer:
        blocks = te.Blocks.of(self._src.ctypes.data, self._dst.ctypes.data, nbytes)
        return self._told(self.peer.write(blocks, tag))

    def read(self, nbytes: int) -> te.Transfer:
        return self._told(
            self.peer.read(te.Blocks.of(self._dst.ctypes.data, self._back.ctypes.data, nbytes))
        )

    def _told(self, transfer: te.Transfer) -> te.Transfer:
        transfer.add_done_callback(self.told.put)
        self._transfers += 1
        return transfer

    def work(self, is_enough: threading.Event) -> None:
        """All that takes locks."""
        self.target.expect(1)
        while not is_enough.is_set():
            self.peer.send_note(b"a note")
            for nbytes in (NBYTES, LARGE):
                wait_a_moment(self.write(nbytes, 1), 0.01)
                wait_a_moment(self.read(nbytes), 0.01)

    def await_all(self) -> None:
        """Each transfer has its outcome, which was told once."""
        for _ in range(self._transfers):
            assert self.told.get(timeout=TIMEOUT_S).poll() is not te.Status.PENDING
        assert self.told.empty()


def call_while_a_lock_is_held(pair: Pair, locks: int) -> None:
    """A worker has the last of so many locks that it takes until these calls have returned."""
    number("goes_on").value = 0
    number("locks_to_hold").value = locks
    is_enough = threading.Event()
    card = pair.source.card()
    with ThreadPoolExecutor(5) as pool, contextlib.ExitStack() as undo:
        undo.callback(is_enough.set)
        undo.callback(setattr, number("goes_on"), "value", 1)
        # Which may have to wait for that lock; then others have the interpreter.
        waits: list[Future[Any]] = [pool.submit(pair.work, is_enough)]
        wait_until(lambda: number("lock_is_held").value, "a worker stands with a lock")
        is_enough.set()
        others: tuple[Callable[[], Any], ...] = (
            pair.target.take_notes,
            lambda: pair.target.arrived(1),
            lambda: pair.target.connect(card),  # a new link, whose ends both engines' workers get
            pair.source.stats,
        )
        waits.extend(pool.submit(call) for call in others)
        for nbytes in (NBYTES, LARGE):
            transfers = [pair.write(nbytes) for _ in range(4)]
            for transfer in transfers:
                transfer.poll()
                wait_a_moment(transfer, 0.001)
                transfer.cancel()
            # To cancel a read is to wait until nothing of it lands any more.
            for read in [pair.read(nbytes) for _ in range(2)]:
                read.poll()
                wait_a_moment(read, 0.001)
        assert number("lock_is_held").value
        number("goes_on").value = 1
        for one in waits:
            one.result(TIMEOUT_S)
    wait_until(lambda: not number("lock_is_held").value, "the worker goes on")
    pair.await_all()
    pair.target.fence(1, TIMEOUT_S)
    assert pair.write(NBYTES).wait(TIMEOUT_S) is te.Status.DONE


def a_worker_stands_still_with_a_lock(make: Callable[[], te.Engine] | None = None) -> None:
    """Whichever it is: who has the interpreter lock waits for none."""
    config = replace(CONFIG, workers=2, rails=2)
    make = make or (lambda: te.Engine(config))
    for locks in range(1, LOCKS):
        with make() as source, make() as target:
            call_while_a_lock_is_held(Pair(source, target), locks)


def a_worker_stands_still_with_a_lock_of_rdma() -> None:
    wires = Wires()
    a_worker_stands_still_with_a_lock(
        lambda: NullEngine(wires, 1, stall_timeout_s=TIMEOUT_S, rail_timeout_s=TIMEOUT_S)
    )


def a_worker_stands_still_with_a_lock_of_the_same_host() -> None:
    config = replace(CONFIG, transports=("samehost",), workers=2, rails=2)
    a_worker_stands_still_with_a_lock(lambda: te.Engine(config))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
