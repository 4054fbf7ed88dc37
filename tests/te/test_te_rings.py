# SPDX-License-Identifier: Apache-2.0
"""Rails on the same host: what the other side can do to the memory that both have mapped."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from dataclasses import replace

import numpy as np
import pytest
from te_far import pattern, wait_until
from te_frames import AckStatus, end, segment, trailer
from te_raw import RawSource, host_hello, read_greeting
from te_ring import HEAD, IN, OUT, RINGS_BYTES, TAIL, RingSocket, make_rings

import te
from te.handshake import decode_card

TIMEOUT_S = 60.0
#: Of all engines: a thread may stand still for seconds.
PATIENT = te.Config(connect_timeout_s=TIMEOUT_S, stall_timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("at", "value"),
    [(OUT + HEAD, 1 << 63), (OUT + HEAD, -1), (OUT + HEAD, 128 << 11), (IN + TAIL, 1)],
)
def test_a_position_that_cannot_be_ends_the_link(
    at: int, value: int, caplog: pytest.LogCaptureFixture
) -> None:
    memory = np.zeros(100, np.uint8)
    with te.Engine(PATIENT) as engine, caplog.at_level(logging.WARNING):
        engine.register(memory, remote="read-write")
        source = RawSource(engine.card(), "samehost")
        assert isinstance(source.sock, RingSocket)
        with source.sock:
            if at == IN + TAIL:  # It shows when the engine answers.
                source.sock.put(at, value)
                source.send(end(1))
            else:
                source.sock.put(at, value)
                with contextlib.suppress(BrokenPipeError):  # It has seen that without the bell.
                    source.sock.bell()
            says = "a position in a ring that cannot be"
            wait_until(lambda: says in caplog.text, says)
            # The end of a link is told before its last connection is counted out.
            wait_until(lambda: engine.stats().rails == 0, "its rail is gone")
        assert not memory.any()


@pytest.mark.parametrize("change", ["short", "unsealed", "none"])
def test_rings_that_could_fail_are_refused(change: str, caplog: pytest.LogCaptureFixture) -> None:
    with te.Engine(PATIENT) as engine, caplog.at_level(logging.INFO):
        card = engine.card()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(f"\0te-{decode_card(card).id}")
            nbytes = RINGS_BYTES - (change == "short")
            seals = fcntl.F_SEAL_GROW if change == "unsealed" else fcntl.F_SEAL_SHRINK
            fd = make_rings(nbytes, seals)
            socket.send_fds(sock, [host_hello(sock, card)], [] if change == "none" else [fd])
            os.close(fd)
            greeting = read_greeting(sock)
            assert greeting is None or sock.recv(1) == b""
        says = "without memory for its rings" if change == "none" else "cannot use the connection"
        wait_until(lambda: says in caplog.text, says)
        assert engine.stats().rails == 0


def test_a_stream_many_times_as_long_as_its_ring() -> None:
    """Odd sizes, so that headers, descriptors and trailers are cut by the ring's end, too."""
    nbytes = 1 << 20
    memory, data = np.zeros(nbytes, np.uint8), pattern(1, nbytes)
    base = int(memory.ctypes.data)
    with te.Engine(PATIENT) as engine:
        engine.register(memory, remote="read-write")
        source = RawSource(engine.card(), "samehost")
        rng = np.random.default_rng(2)
        with source.sock:
            number, at = 0, 0
            while at < nbytes:
                sizes = rng.integers(1, 3000, 9)
                landings = []
                for size in sizes.tolist():
                    size = min(size, nbytes - at - sum(one[1] for one in landings))
                    if size:
                        landings.append((base + at + sum(one[1] for one in landings), size))
                length = sum(one[1] for one in landings)
                number += 1
                source.send(
                    segment(number, 0, landings, length),
                    data[at : at + length].tobytes(),
                    trailer(),
                )
                at += length
            for _ in range(number):
                assert source.ack().status is AckStatus.LANDED
        assert (memory == data).all()


@pytest.mark.parametrize("spin_s", [0.0, 50e-6, 0.1])
def test_a_reader_that_sleeps_is_woken_up_by_each_answer(spin_s: float) -> None:
    """Once, however long the engine looks for what comes next before it sleeps itself."""
    with te.Engine(replace(PATIENT, spin_s=spin_s)) as engine:
        source = RawSource(engine.card(), "samehost")
        assert isinstance(source.sock, RingSocket)
        with source.sock:
            for i in range(1, 200):
                source.sock.sleep()
                source.send(end(i))
                source.sock.await_bell()
                assert source.ack().status is AckStatus.LANDED


def test_what_was_sent_before_the_end_still_lands() -> None:
    memory = np.zeros(1000, np.uint8)
    with te.Engine(PATIENT) as engine:
        engine.register(memory, remote="read-write")
        engine.expect(4)
        source = RawSource(engine.card(), "samehost")
        landings = [(int(memory.ctypes.data), 1000)]
        with source.sock:
            source.send(segment(1, 4, landings, 1000), b"\5" * 1000, trailer())
        wait_until(lambda: engine.arrived(4) == 1, "it has arrived")
        assert (memory == 5).all()
        wait_until(lambda: engine.stats().rails == 0, "the link has ended")


def test_small_blocks_go_through_the_rings_both_ways() -> None:
    nbytes, count = 1 << 20, 10_000
    src, dst = pattern(3, nbytes), np.zeros(nbytes, np.uint8)
    with te.Engine(PATIENT) as source, te.Engine(PATIENT) as target:
        here, there = source.register(src), target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        assert peer.transport == "samehost"
        offsets = np.arange(count, dtype=np.uint64) * 100
        blocks = te.Blocks.of(here.address + offsets, there.address + offsets, 97)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        rows = slice(0, count * 100)
        assert (dst[rows].reshape(-1, 100)[:, :97] == src[rows].reshape(-1, 100)[:, :97]).all()
        assert not dst[rows].reshape(-1, 100)[:, 97:].any()
        src[:] = 0
        back = te.Blocks.of(there.address + offsets, here.address + offsets, 97)
        assert peer.read(back).wait(TIMEOUT_S) is te.Status.DONE
        assert (src[rows] == dst[rows]).all()
