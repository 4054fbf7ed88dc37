# SPDX-License-Identifier: Apache-2.0
"""The same host: whose memory is copied, and what becomes of it when that process ends."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from te_far import wait_until
from te_frames import HEADER, AckStatus, Kind, descriptors
from te_host import PAGE, memory_file, rail_refused, say
from te_raw import (
    NONCE,
    TIMEOUT_S,
    RawSource,
    read_exactly,
    session_of,
)
from te_ring import RINGS_BYTES, make_rings

import te
from te.core.engine import Engine as Plane
from te.core.wire import MAY_WRITE_UNTAGGED
from te.handshake import decode_card
from te.memory_kinds import HOST
from te.reasons import Reason, sentence
from te.transports.samehost._core import NONCE_NBYTES, SamehostLink, read_process
from te.transports.samehost.messages import Nonce, Shared
from te.transports.samehost.process import (
    Process,
)
from te.transports.samehost.reach import NonceMemory, cannot_read

PATHS = ":".join([str(Path(te.__file__).parents[1]), str(Path(__file__).parent)])
MARK = b"only for its owner" * 10


def test_a_link_of_this_host_begins_with_a_look_into_its_process() -> None:
    elsewhere = NonceMemory()
    with te.Engine() as engine:
        card, pid = engine.card(), os.getpid()
        strange = Nonce(NONCE.nonce.address, elsewhere.nonce.data)
        assert rail_refused(card, nonce=strange) == f"process {pid} is not the one that greets"
        nowhere = Nonce(8, NONCE.nonce.data)
        assert (
            rail_refused(card, nonce=nowhere) == f"process_vm_readv of process {pid}: Bad address"
        )
        source = RawSource(card, "samehost", link=6)
        with source.sock:
            other = "the link that it names has another nonce"
            assert rail_refused(card, nonce=elsewhere.nonce, link=6) == other
            fd = memory_file(PAGE)
            shared = Shared(PAGE, PAGE, 1, 1)
            assert say(card, shared, fd, 6, elsewhere.nonce) == other
            assert say(card, shared, fd, 6) is None
            os.close(fd)


def test_the_nonce_of_a_process_is_not_in_its_children() -> None:
    """Nor does it move: the parent reads it where it was."""
    memory = NonceMemory()
    nonce = memory.nonce
    assert read_process(os.getpid(), nonce.address, len(nonce.data)) == nonce.data
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go_on[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        assert read_process(child, nonce.address, len(nonce.data)) == bytes(len(nonce.data))
        process = Process(child, os.pidfd_open(child))
        assert cannot_read(process, nonce) == f"process {child} is not the one that greets"
    finally:
        os.write(go_on[1], b"x")
        os.waitpid(child, 0)
    assert "No such process" in str(cannot_read(process, nonce))
    process.close()
    for fd in (*ready, *go_on):
        os.close(fd)
    assert read_process(os.getpid(), nonce.address, len(nonce.data)) == nonce.data


def test_what_was_read_by_the_number_of_a_process_that_ended_counts_nothing() -> None:
    """As if the number had been given to this process since."""
    ended = subprocess.Popen(["true"])
    process = Process(os.getpid(), os.pidfd_open(ended.pid))
    ended.wait()
    assert cannot_read(process, NONCE.nonce) == f"process {os.getpid()} has ended"
    process.close()


def test_without_memory_that_children_do_not_have_there_is_no_link_on_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel does not know the advice."""
    with monkeypatch.context() as old, te.Engine() as other:
        old.setattr("te.transports.samehost.reach._MADV_WIPEONFORK", 9999)
        with te.Engine(te.Config(transports=("samehost", "tcp"))) as engine:
            assert engine.stats().transports == ("tcp",)
            assert list(decode_card(engine.card()).offers) == ["tcp"]
            peer = engine.connect(other.card())
            assert peer.transport == "tcp"
            assert (
                "samehost: cannot allocate memory that child processes do not inherit"
                in peer.transport_reason
            )
            source = RawSource(engine.card())
            source.sock.close()
        with pytest.raises(te.DeviceError, match="cannot allocate memory that child processes"):
            te.Engine(te.Config(transports=("samehost",)))


@pytest.mark.slow
def test_a_rail_of_another_process_joins_no_link() -> None:
    with te.Engine() as engine:
        card = engine.card()
        source = RawSource(card, "samehost", link=3)
        with source.sock:
            for what in ("rail", "memory"):
                assert in_child(card, what) == f"the link that it names is of process {os.getpid()}"


#: Another process that has got to know what the greetings of link 3 say, and its session key: it
#: names the same nonce.
CHILD = """
import os, socket, sys
sys.path[:0] = sys.argv[1].split(":")
import te_raw, te_ring
from te.transports.samehost.messages import Nonce, Shared
card, what = bytes.fromhex(sys.argv[2]), sys.argv[3]
te_raw.knows_session(card, 3, bytes.fromhex(sys.argv[6]))
nonce = Nonce(int(sys.argv[4]), bytes.fromhex(sys.argv[5]))
shared = Shared(1, 1, 1, 1) if what == "memory" else None
with te_raw.dial_unix(card) as sock:
    data = te_raw.host_hello(sock, card, nonce, shared, link=3)
    socket.send_fds(sock, [data], [te_ring.make_rings()])
    print(te_raw.refusal(sock).reason)
"""


def in_child(card: bytes, what: str) -> str:
    """Why its greeting was refused."""
    nonce = NONCE.nonce
    session = session_of(card, 3)._secret.hex()
    arguments = [PATHS, card.hex(), what, str(nonce.address), nonce.data.hex(), session]
    return subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        check=True, capture_output=True, text=True, timeout=TIMEOUT_S,
    ).stdout.strip()  # fmt: skip


#: A source that tells where its nonce and its data are, connects, leaves the connection to a child
#: of its own, and ends: its number is free from when it is waited for.
FORKING = """
import ctypes, os, sys, time
sys.path[:0] = sys.argv[1].split(":")
import te_raw
from te_frames import Kind, descriptors
card = bytes.fromhex(sys.argv[2])
secret = ctypes.create_string_buffer(bytes.fromhex(sys.argv[4]))
source = te_raw.RawSource(card, "samehost")
if os.fork():
    os._exit(0)
os.setsid()
print(os.getppid(), ctypes.addressof(secret), flush=True)
assert sys.stdin.readline() == "go\\n"
source.send(descriptors(Kind.PULL, 1, [(ctypes.addressof(secret), int(sys.argv[3]), 100)]))
print(source.closed(), flush=True)
sys.stdin.read()
"""


def _links_ended(engine: te.Engine) -> int:
    counted = engine.stats().by_transport.values()
    return sum(sum(one.links_ended.values()) for one in counted)


def test_a_link_dies_with_its_process_although_a_child_keeps_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = np.zeros(100, np.uint8)
    with te.Engine() as engine, caplog.at_level(logging.INFO):
        engine.register(memory, remote="read-write")
        arguments = [PATHS, engine.card().hex(), str(memory.ctypes.data), MARK.hex()]
        with subprocess.Popen(
            [sys.executable, "-c", FORKING, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            try:
                parent.stdout.readline()
                # Before the engine has accepted the link, there is no rail either.
                wait_until(lambda: _links_ended(engine) == 1, "the link has ended")
                parent.stdin.write("go\n")
                parent.stdin.flush()
                assert parent.stdout.readline() == "True\n"
            finally:
                parent.stdin.close()  # The child ends with it.
        wait_until(lambda: "its process has ended" in caplog.text, "the log says why")
        assert not memory.any()


def test_nothing_is_copied_from_a_number_whose_process_has_ended() -> None:
    """Before any worker has looked for the end of the process by itself: the copy looks."""
    plane = Plane(1, 1000.0, 1000.0, 0.0, 1 << 20, 100)
    memory = np.zeros(len(MARK), np.uint8)
    start = int(memory.ctypes.data)
    kind = HOST.compiled
    plane.add_region(start, start + len(MARK), 1, kind, MAY_WRITE_UNTAGGED, False)
    secret = np.frombuffer(MARK, np.uint8).copy()
    ended = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(ended.pid)
    ended.wait()
    # The number of a stranger, as if it had been given out again: this process.
    nonce = NONCE.nonce
    link = SamehostLink(plane, True, os.getpid(), pidfd, nonce.address, nonce.data)
    here, there = socket.socketpair()
    here.setblocking(False)
    fd = make_rings()
    with there:
        assert link.add_rail(here.fileno(), fd)
        here.detach()
        rings = mmap.mmap(fd, RINGS_BYTES)
        frame = descriptors(Kind.PULL, 1, [(int(secret.ctypes.data), start, len(MARK))])
        rings[PAGE : PAGE + len(frame)] = frame
        rings[0:8] = len(frame).to_bytes(8, "little")
        worker = threading.Thread(target=plane.work, args=[0])
        worker.start()
        wait_until(lambda: not link.alive, "the link has ended")
        plane.stop()
        worker.join(TIMEOUT_S)
        rings.close()
    assert link.death[0] == Reason.PROCESS_GONE
    assert "its process has ended" in sentence("it", *link.death, 1.0)
    assert not memory.any()


HALF = 256 << 10


@contextlib.contextmanager
def half_readable() -> Iterator[int]:
    """The address of memory of which the second `HALF` cannot be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = mmap.mmap(-1, 2 * HALF)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert libc.mprotect(ctypes.c_void_p(address + HALF), HALF, 0) == 0
    yield address
    assert libc.mprotect(ctypes.c_void_p(address + HALF), HALF, mmap.PROT_READ) == 0


@pytest.mark.parametrize("nbytes", [PAGE, HALF, 2 * HALF])
@pytest.mark.parametrize("goes", ["changes", "is unmapped"])
def test_a_copy_counts_only_beside_the_nonce_of_its_process(
    goes: str, nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As after execve(2): the number and the connection are the same, the memory is another's. Also
    where the copy stops in the middle, and of small ones before long."""
    memory = np.zeros(2 * HALF, np.uint8)
    there = int(memory.ctypes.data)
    with te.Engine() as engine, half_readable() as here, caplog.at_level(logging.INFO):
        engine.register(memory, remote="read-write")
        nonce = NonceMemory()
        source = RawSource(engine.card(), "samehost", nonce=nonce.nonce)
        with source.sock:
            source.send(descriptors(Kind.PULL, 1, [(here, there, HALF)]))
            assert source.ack().status is AckStatus.LANDED
            source.send(descriptors(Kind.PULL, 2, [(here, there, 2 * HALF)]))
            refused = source.ack()
            assert refused.status is AckStatus.REFUSED
            assert "the source memory cannot be read" in refused.reason
            if goes == "changes":
                nonce._page[:NONCE_NBYTES] = bytes(NONCE_NBYTES)
            else:
                page = ctypes.c_void_p(nonce.nonce.address)
                assert ctypes.CDLL(None).mprotect(page, PAGE, 0) == 0
            if nbytes < HALF:
                assert ends_before_long(source, here, there, nbytes)
            else:
                source.send(descriptors(Kind.PULL, 3, [(here, there, nbytes)]))
                assert source.closed()
        wait_until(lambda: "its process has ended" in caplog.text, "the log says why")


def test_nothing_lands_of_another_program() -> None:
    """The nonce is there, and another's: what is copied with it has landed when it is seen."""
    memory, secret = np.zeros(PAGE, np.uint8), np.full(PAGE, 7, np.uint8)
    there = int(memory.ctypes.data)
    with te.Engine() as engine:
        engine.register(memory, remote="read-write")
        nonce = NonceMemory()
        source = RawSource(engine.card(), "samehost", nonce=nonce.nonce)
        with source.sock:
            nonce._page[:NONCE_NBYTES] = bytes(NONCE_NBYTES)
            source.send(descriptors(Kind.PULL, 1, [(int(secret.ctypes.data), there, PAGE)]))
            assert source.closed()
        assert not memory.any()


def ends_before_long(source: RawSource, here: int, there: int, nbytes: int) -> bool:
    """Whether the link ends while one small copy follows the other."""
    until_s = time.monotonic() + TIMEOUT_S
    number = 2
    while time.monotonic() < until_s:
        number += 1
        try:
            source.send(descriptors(Kind.PULL, number, [(here, there, nbytes)]))
        except ConnectionError:
            return True
        if read_exactly(source.sock, HEADER.size) is None:
            return True
    return False


def test_a_pull_link_needs_the_descriptor_of_its_process() -> None:
    plane = Plane(1, 1.0, 1.0, 0.0, 1 << 20, 100)
    with pytest.raises(ValueError, match="needs its descriptor"):
        SamehostLink(plane, True, os.getpid(), -1, 1, bytes(NONCE_NBYTES))
    for nbytes in (0, NONCE_NBYTES - 1, NONCE_NBYTES + 1):
        with pytest.raises(ValueError, match=f"a nonce of {nbytes} bytes, which must be 16"):
            SamehostLink(plane, True, os.getpid(), 0, 1, bytes(nbytes))
