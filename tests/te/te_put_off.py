# SPDX-License-Identifier: Apache-2.0
"""A process whose threads stand still where they seldom would, by ``callers.c``: for tests that
start it with the name of one of the functions. It ends well, or says what is wrong."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Final

import numpy as np
from te_direct import NullEngine
from te_far import is_readable, wait_until
from te_frames import BLOCK, HEADER, LANDING, REPLY, AckStatus, Kind, ack, header, segment, trailer
from te_raw import RawListener, read_exactly
from te_two_rails import TwoRails

import te
from te_bench._null import Wires

TIMEOUT_S: Final = 30.0
FAR: Final = 1 << 20
NBYTES: Final = 1 << 12
#: Far more than the kernel keeps for a peer that reads nothing.
MUCH: Final = 1 << 25
STALL_S: Final = 0.5
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


def write_for_ever(peer: te.Peer, src: Any) -> te.Transfer:
    """Nobody answers it."""
    return peer.write(te.Blocks.of(src.ctypes.data, FAR, src.nbytes))


def wait_in_vain(transfer: te.Transfer, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        transfer.wait(timeout_s)
        raise AssertionError(transfer)


def a_worker_reads_while_a_caller_goes_to_sleep() -> None:
    """The whole reply to a read is there when its worker takes the payload, and the trailer with
    it: nothing more comes. Meanwhile a caller looks in vain for the worker's turn."""
    src, dst = np.zeros(NBYTES, np.uint8), np.zeros(NBYTES, np.uint8)
    with RawListener("tcp") as listener, te.Engine(CONFIG) as engine:
        engine.register(src)
        engine.register(dst)
        peer, sock = listener.connect(engine)

        def answer_reads() -> None:
            while data := read_exactly(sock, HEADER.size):
                kind, _, _, count, transfer, _, nbytes, _ = HEADER.unpack(data)
                if kind == Kind.SEGMENT:
                    read_exactly(sock, LANDING.itemsize * count + nbytes + len(trailer()))
                elif kind == Kind.READ:
                    read_exactly(sock, BLOCK.itemsize * count)
                    landings = [(dst.ctypes.data, NBYTES)]
                    head = segment(1, transfer, landings, NBYTES, flags=REPLY)
                    sock.sendall(head + bytes([9]) * NBYTES + trailer())

        threading.Thread(target=answer_reads, daemon=True).start()
        write = write_for_ever(peer, src)
        wait_in_vain(write, 0.01)
        number("slow_worker_us").value = 200_000
        read = peer.read(te.Blocks.of(FAR, dst.ctypes.data, NBYTES))
        while not number("workers_reading").value:
            time.sleep(0.001)
        number("slow_caller_us").value = 600_000
        wait_in_vain(write, 0.01)
        assert number("callers_put_off").value == 1
        assert read.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()


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
    with te.Engine(config) as engine, contextlib.closing(TwoRails(engine)) as link:
        engine.register(dst)
        number("slow_worker_us").value = round(4 * STALL_S * 1e6)
        read = link.peer.read(te.Blocks.of(FAR, dst.ctypes.data, NBYTES))
        transfer, _ = link.take(Kind.READ)
        link.reply(1, transfer, dst.ctypes.data, bytes([9]) * NBYTES)
        assert read.wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()


def what_a_caller_leaves_to_a_worker_that_stands_still() -> None:
    """A calling thread finds the reply to the first transfer where it looks for its own answer, and
    leaves it. The connection was not looked at by that, for however long its worker takes."""
    config = replace(
        CONFIG, workers=2, rails=2, stall_timeout_s=STALL_S, socket_buffer_bytes=1 << 12
    )
    src, dst = np.zeros(1 << 18, np.uint8), np.zeros((2, NBYTES), np.uint8)
    with te.Engine(config) as engine, contextlib.closing(TwoRails(engine)) as link:
        engine.register(src)
        engine.register(dst)
        owners, others = link.rails
        reads, numbers = [], []
        for one, rail in zip(dst, link.rails, strict=True):  # They take turns.
            reads.append(link.peer.read(te.Blocks.of(FAR, one.ctypes.data, NBYTES)))
            numbers.append(link.take(Kind.READ, rail)[0])
        large = write_for_ever(link.peer, src)
        assert is_readable(owners, TIMEOUT_S)
        # While the owner's connection is busy the other one takes it, and so brings its answer.
        small = write_for_ever(link.peer, src[:NBYTES])
        small_number, _ = link.take(Kind.SEGMENT, others)
        owners.sendall(ack(link.take(Kind.SEGMENT, owners)[0], AckStatus.LANDED))
        assert large.wait(TIMEOUT_S) is te.Status.DONE
        link.reply(0, numbers[1], dst[1].ctypes.data, bytes([9]) * NBYTES)
        assert reads[1].wait(TIMEOUT_S) is te.Status.DONE
        number("holds_next_worker").value = 1
        link.reply(1, numbers[0], dst[0].ctypes.data, bytes([9]) * NBYTES)
        wait_until(lambda: number("workers_held").value, "the second connection's worker stands")
        until_s = time.monotonic() + 4 * STALL_S
        while time.monotonic() < until_s:
            wait_in_vain(small, 0.01)
        number("goes_on").value = 1
        assert reads[0].wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 9).all()
        others.sendall(ack(small_number, AckStatus.LANDED))
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


if __name__ == "__main__":
    globals()[sys.argv[1]]()
