# SPDX-License-Identifier: Apache-2.0
"""Descriptors that strangers on the same host send, and those that an engine hands out."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from te_far import wait_until
from te_frames import AckStatus, end
from te_host import PAGE, say
from te_raw import RawSource, dial_unix, host_hello, read_greeting
from te_ring import RINGS_BYTES

import te
from te.buffers import F_SEAL_FUTURE_WRITE
from te.connect.foreign import close_foreign
from te.transports.samehost import transport
from te.transports.samehost.messages import Shared
from te.transports.samehost.process import may_look_here

TIMEOUT_S = 60.0
LINGER_S = 3600
HUGE = 2 << 20


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """A descriptor of a TCP socket with unsent data, whose last close waits for an hour."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(bytes(1 << 16))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        fd = one.detach()
        yield fd
        # The end of the other side is an end of any lingering that there is.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()


def assert_accepts(card: bytes) -> None:
    with dial_unix(card) as sock:
        host_hello(sock, card)  # Which waits for a challenge.


@pytest.mark.parametrize("begun", [b"", b"te-wire\0"])
def test_a_descriptor_before_any_proof_keeps_nobody_waiting(begun: bytes) -> None:
    """With the call that it comes with, or unread behind it."""
    with te.Engine() as engine, lingering() as one, lingering() as other:
        card = engine.card()
        with dial_unix(card) as sock:
            if begun:
                sock.sendall(begun)
            for fd in (one, other):
                try:
                    socket.send_fds(sock, [b"x"], [fd])
                except BrokenPipeError:
                    close_foreign(fd)  # The engine was faster: this is the last one.
                else:
                    os.close(fd)
            assert read_greeting(sock) is None
        assert_accepts(card)


def test_a_descriptor_with_a_call_is_against_the_protocol(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with te.Engine() as engine, dial_unix(engine.card()) as sock:
        fd = os.memfd_create("memory")
        socket.send_fds(sock, [b"t"], [fd])
        os.close(fd)
        assert read_greeting(sock) is None
        wait_until(lambda: "a call with a descriptor" in caplog.text, "the log says why")


def test_a_lingering_socket_for_rings_keeps_nobody_waiting() -> None:
    with te.Engine() as engine, lingering() as fd, dial_unix(engine.card()) as sock:
        card = engine.card()
        socket.send_fds(sock, [host_hello(sock, card)], [fd])
        os.close(fd)
        read_greeting(sock)
        assert sock.recv(1) == b""
        assert_accepts(card)


# -- memory files of huge pages


def of_huge_pages(*seals: int) -> int:
    try:
        fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as exc:
        pytest.skip(f"this kernel has no memory files of huge pages: {exc.strerror}")
    os.ftruncate(fd, max(HUGE, RINGS_BYTES))
    for seal in seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
    return fd


def test_huge_pages_that_can_be_taken_out_are_not_mapped() -> None:
    with te.Engine() as engine:
        card = engine.card()
        source = RawSource(card, "samehost", link=1)
        with source.sock:
            fd = of_huge_pages(fcntl.F_SEAL_SHRINK)
            problem = say(card, Shared(HUGE, PAGE, 1, 1), fd, 1)
            os.close(fd)
            assert problem is not None
            assert "of huge pages that can be taken out" in problem
            # As of te.allocate: it may lack pages, and is not refused for its seals.
            fd = of_huge_pages(fcntl.F_SEAL_SHRINK, F_SEAL_FUTURE_WRITE)
            problem = say(card, Shared(HUGE, PAGE, 2, 2), fd, 1)
            os.close(fd)
            assert problem is None or "huge pages" not in problem
            source.send(end(1))
            assert source.ack().status is AckStatus.LANDED


# -- memory files that an engine hands out


@pytest.mark.parametrize(
    ("remote", "is_of_user", "maps"),
    [("tagged", True, 1), ("read", False, 0), ("none", True, 0)],
)
def test_a_memory_file_goes_to_whom_it_may(
    remote: te.memory.Remote, is_of_user: bool, maps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gets it can read all of it, and nothing that the other side says decides that."""
    mapped: list[int] = []
    about_shared = transport._about_shared

    def count(*arguments: object) -> object:
        mapped.append(1)
        return about_shared(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(transport, "_about_shared", count)
    monkeypatch.setattr(transport, "may_look_here", lambda _: is_of_user)
    with te.Engine() as source, te.Engine() as target:
        buffer, dst = te.allocate(PAGE), np.zeros(PAGE, np.uint8)
        np.frombuffer(buffer, np.uint8)[:] = 7
        near = source.register(buffer, remote=remote)
        far = target.register(dst, remote="read-write")
        peer = source.connect(target.card())
        assert peer.transport == "samehost"
        assert len(mapped) == maps
        blocks = te.Blocks.of(near.address, far.address, PAGE)
        assert peer.write(blocks).wait(TIMEOUT_S) is te.Status.DONE
        assert (dst == 7).all()


def test_who_may_look_into_this_process() -> None:
    """Its own user may. Another one may not, whatever this one may do there."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert may_look_here(ours)
    if os.geteuid():
        pytest.skip("only root can become another user")
    name = f"\0te-test-{os.getpid()}"
    listens, over = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(1)
            os.write(listens[1], b"1")
            os.close(over[1])
            os.read(over[0], 1)
        os._exit(0)
    try:
        os.read(listens[0], 1)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(name)
            assert not may_look_here(sock)
    finally:
        for fd in (*listens, *over):
            os.close(fd)
        os.waitpid(child, 0)


def test_nobody_may_read_this_process_before_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even who listens where an engine should."""
    let_in: list[int] = []
    monkeypatch.setattr(transport.reach.READERS, "allow", let_in.append)
    with te.Engine(te.Config(transports=("samehost",), connect_timeout_s=TIMEOUT_S)) as source:
        gone = te.Engine()
        card, name = gone.card(), f"\0te-{gone.id}"
        gone.close()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen(8)

            def hang_up() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        sock, _ = listener.accept()
                        sock.recv(1 << 12)
                        sock.close()

            liar = threading.Thread(target=hang_up)
            liar.start()
            with pytest.raises(te.ConnectError):
                source.connect(card)
            listener.shutdown(socket.SHUT_RDWR)
            liar.join(TIMEOUT_S)
        assert let_in == []
        with te.Engine() as target:
            assert source.connect(target.card()).transport == "samehost"
        assert let_in
