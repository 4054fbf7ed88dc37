# SPDX-License-Identifier: Apache-2.0
"""The owner of a host and who uses it, line by line: messages, descriptors, the lock, memory."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

import pytest
from store_host import dial, join, receive, send
from store_makers import TIMEOUT_S, config, until
from store_objects import MIB

from kvstore.host import agreement
from kvstore.host.hosting import Brought, Hosting
from kvstore.host.messages import Joined, Refused
from kvstore.host.place import Place
from kvstore.memory.memory_file import MemoryFile

pytestmark = pytest.mark.slow


def test_whoever_starts_the_next_owner_it_gets_the_memory_of_who_holds_it(
    directory: Path,
) -> None:
    """The one that starts it has nothing: it waits until somebody else comes."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    left = MemoryFile.make(1 * MIB)
    left.buffer[:5] = b"bytes"
    lock.note(left.name)
    hosting = Hosting(place, lock, agreement.pool(config(directory)), None)
    hosting.close(is_left=True)
    assert lock.memory() == left.name
    hosting = Hosting(place, lock, agreement.pool(config(directory)), 600.0)
    found: list[Brought | None] = []
    thread = threading.Thread(target=lambda: found.append(hosting.adopt()))
    thread.start()
    empty, other, held = (dial(place) for _ in range(3))
    wrong = MemoryFile.make(1 * MIB)
    try:
        send(empty, join(directory), [])
        send(other, join(directory, wrong.name), [wrong.readable_fd])
        was = agreement.wishes(config(directory, 1 * MIB))
        send(held, join(directory, left.name, was), [left.readable_fd])
        thread.join(TIMEOUT_S)
        (brought,) = found
        assert brought is not None
        assert (brought.name, brought.was) == (left.name, was)
        memory = MemoryFile.adopt(brought.fd, 1 * MIB, brought.name)
        os.close(brought.fd)
        assert memory.buffer[:5] == b"bytes"
        hosting.ready(was, memory)
        for line in (empty, other, held):
            answer, fds = receive(line)
            assert isinstance(answer, Joined)
            assert answer.memory == left.name
            assert os.pread(fds[0], 5, 0) == b"bytes"
            with pytest.raises(OSError, match="denied"):
                mmap.mmap(fds[0], 1 * MIB)  # To be written.
            os.close(fds[0])
        assert hosting.users == 3
        memory.close()
    finally:
        for line in (empty, other, held):
            line.close()
        hosting.end()
        hosting.close(is_left=False)
        assert lock.memory() == ""
        lock.close()
        left.close()
        wrong.close()


def test_a_second_signal_writes_to_nothing_else(directory: Path) -> None:
    """While an owner writes to its disk behind its end, files get the numbers of descriptors."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    hosting = Hosting(place, lock, [], None)
    hosting.close(is_left=False)
    fds = [os.memfd_create("segment") for _ in range(8)]
    try:
        hosting.end()
        assert [os.fstat(fd).st_size for fd in fds] == [0] * 8
    finally:
        for fd in fds:
            os.close(fd)
        lock.close()


def test_the_memory_of_another_pool_is_not_taken_over(directory: Path) -> None:
    """A server with another secret may be the first that starts an owner after the last one's
    death."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    left = MemoryFile.make(1 * MIB)
    lock.note(left.name)
    hosting = Hosting(place, lock, ["another"], 600.0)
    line = dial(place)
    try:
        send(line, join(directory, left.name), [left.readable_fd])
        assert hosting.adopt() is None
        hosting.ready({}, None)
        answer, fds = receive(line)
        assert isinstance(answer, Refused)
        assert not fds
    finally:
        line.close()
        hosting.close(is_left=False)
        lock.close()
        left.close()


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(directory: Path) -> None:
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(write)
        os.read(read, 1)  # Until the test has ended.
        os._exit(0)
    try:
        assert place.lock() is None
        lock.close()
        until(lambda: not holds(pid, directory / "owner.lock"), "the child has begun")
        again = place.lock()
        assert again is not None
        again.close()
    finally:
        os.close(write)
        os.waitpid(pid, 0)
        os.close(read)


def holds(pid: int, path: Path) -> bool:
    return str(path) in [str(one.readlink()) for one in Path(f"/proc/{pid}/fd").iterdir()]


def test_memory_that_is_not_an_owner_s_is_not_taken_over() -> None:
    memory = MemoryFile.make(1 * MIB)
    with pytest.raises(ValueError, match="has 1048576 bytes, and 2097152 are needed"):
        MemoryFile.adopt(memory.readable_fd, 2 * MIB, memory.name)
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    with pytest.raises(ValueError, match="was not made by an owner"):
        MemoryFile.adopt(fd, MIB, memory.name)
    os.close(fd)
    read, write = os.pipe()
    with pytest.raises(ValueError, match="no memory file"):
        MemoryFile.adopt(read, MIB, memory.name)
    os.close(read)
    os.close(write)
    memory.close()
