# SPDX-License-Identifier: Apache-2.0
"""The owner of a host and who uses it, line by line: messages, descriptors, the lock, memory."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs
from store_host import dial, join, receive, send, shared
from store_makers import TIMEOUT_S, config, descriptors, until
from store_objects import MIB

from kvstore.host import agreement, lease, lifetime, starting
from kvstore.host.hosting import Brought, Hosting
from kvstore.host.lease import Lease
from kvstore.host.messages import BYTES_MAX, Farewell, Joined, Refused, encode
from kvstore.host.place import Lock, Place
from kvstore.host.starting import Starting
from kvstore.memory.memory_file import MemoryFile
from kvstore.serving import ended_by_signals

pytestmark = pytest.mark.slow


@pytest.fixture
def patient_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for memory of the last owner until somebody brings it."""
    monkeypatch.setattr(lifetime, "ADOPTION_S", TIMEOUT_S)


@pytest.mark.usefixtures("patient_owner")
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


def test_a_signal_that_does_not_wake_the_main_thread_ends_an_owner(directory: Path) -> None:
    """The kernel may give it to another thread. That it came between the last look at signals and
    the system call, in which the main thread then stayed for ever, was seen once."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    hosting = Hosting(place, lock, [], None)
    is_late = threading.Event()
    main = threading.main_thread().native_id

    def rescue() -> None:
        is_late.set()
        hosting.end()

    def get_it() -> None:
        until(lambda: "\nState:\tS" in Path(f"/proc/self/task/{main}/status").read_text())
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    late = threading.Timer(TIMEOUT_S, rescue)
    late.start()
    other = threading.Thread(target=get_it)
    with ended_by_signals(hosting.end) as signalled_fd:
        hosting.wake_on(signalled_fd)
        other.start()
        hosting.run()
        late.cancel()
        other.join()
        hosting.close(is_left=False)
    lock.close()
    assert not is_late.is_set()


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


@pytest.mark.usefixtures("patient_owner")
def test_the_memory_of_another_pool_is_not_taken_over(directory: Path) -> None:
    """A server with another secret may be the first that starts an owner after the last one's
    death."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    left = MemoryFile.make(1 * MIB)
    lock.note(left.name)
    hosting = Hosting(place, lock, ["another"], 600.0)
    line, found = dial(place), list[Brought | None]()
    thread = threading.Thread(target=lambda: found.append(hosting.adopt()))
    thread.start()
    try:
        send(line, join(directory, left.name), [left.readable_fd])
        until(lambda: hosting._waiting, "it has been offered")
        hosting.end()
        thread.join(TIMEOUT_S)
        assert found == [None]
        hosting.ready({}, None)
        answer, fds = receive(line)
        assert isinstance(answer, Refused)
        assert not fds
    finally:
        line.close()
        hosting.close(is_left=False)
        lock.close()
        left.close()


@pytest.mark.parametrize(("encrypts", "takes_over"), [(False, False), (True, True)])
def test_who_encrypts_does_not_use_an_owner_that_does_not(
    directory: Path, encrypts: bool, takes_over: bool
) -> None:
    """Nor does an owner of those who encrypt give way to one that does not."""
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    hosting = Hosting(place, lock, agreement.pool(config(directory)), 600.0)
    hosting.ready({"memory": MIB, "network": {"encrypt": encrypts}}, None)
    thread = threading.Thread(target=hosting.run)
    thread.start()
    usual, other = dial(place), dial(place)
    try:
        wishes = {"network": {"encrypt": encrypts}}
        send(usual, structs.replace(join(directory), wishes=wishes), [])
        assert isinstance(receive(usual)[0], Joined)
        wishes = {"network": {"encrypt": not encrypts}}
        question = structs.replace(join(directory), wishes=wishes, takes_over=takes_over)
        send(other, question, [])
        answer, _ = receive(other)
        assert isinstance(answer, Refused)
        assert "of it and this process one encrypts" in answer.why
    finally:
        for line in (usual, other):
            line.close()
        hosting.end()
        thread.join(TIMEOUT_S)
        hosting.close(is_left=False)
        lock.close()


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
    """A descriptor that the process closes while it is looked at is not one that it holds."""
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if one.readlink() == path:
                return True
    return False


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


@pytest.mark.usefixtures("patient_owner")
def test_who_goes_or_asks_twice_before_the_owner_is_ready(directory: Path) -> None:
    """One goes before it is answered; another one asks twice, and brings the memory both times."""
    gc.collect()  # What tests before have left must not go meanwhile.
    before = descriptors()
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    left = MemoryFile.make(1 * MIB)
    lock.note(left.name)
    hosting = Hosting(place, lock, agreement.pool(config(directory)), 0.0)
    gone, twice = dial(place), dial(place)
    thread = threading.Thread(target=hosting.run)
    try:
        send(gone, join(directory), [])
        for _ in range(2):
            send(twice, join(directory, left.name), [left.readable_fd])
        brought = hosting.adopt()
        assert brought is not None
        os.close(brought.fd)
        gone.close()
        hosting.ready({}, None)
        assert hosting.users == 1, "nobody is there for the one that has gone"
        thread.start()
        for _ in range(2):
            answer, _ = receive(twice)
            assert isinstance(answer, Joined)
        assert hosting.users == 1, "it is one, however often it asks"
        twice.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), "nobody uses it any more"
    finally:
        for line in (gone, twice):
            line.close()
        hosting.end()
        thread.join(TIMEOUT_S)
        hosting.close(is_left=False)
        lock.close()
        left.close()
    del left
    assert descriptors() <= before


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"\xc1", "it cannot be read"),
        (encode(Farewell()), "it answers with Farewell"),
        (b"", "it has ended the connection"),
    ],
)
def test_an_owner_that_answers_nonsense_is_not_joined(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, why: str
) -> None:
    """The server comes up, asks again, and keeps no descriptor that came along."""
    place = Place(directory)
    lock = place.lock()  # Else it would start an owner.
    assert lock is not None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(place.socket))
    listener.listen()
    gc.collect()  # What tests before have left must not go meanwhile.
    before = descriptors()

    def talk() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:  # The test has ended.
                return
            with line, contextlib.suppress(OSError):  # Or who asks has gone.
                line.recv(BYTES_MAX)
                if answer:
                    socket.send_fds(line, [answer], [lock.fd])

    thread = threading.Thread(target=talk)
    thread.start()
    monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", 0.1)
    mine = Lease(shared(directory), place)
    try:
        monkeypatch.setattr(lease, "JOIN_TIMEOUT_S", TIMEOUT_S)
        until(lambda: why in mine._said, "it is said")
        assert not mine.is_joined
    finally:
        mine.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(TIMEOUT_S)
        assert descriptors() <= before
        listener.close()
        lock.close()


@contextlib.contextmanager
def hosted(directory: Path, has: dict[str, object]) -> Iterator[None]:
    """An owner that is so, and has no memory."""
    place, locks = Place(directory), list[Lock]()

    def is_locked() -> bool:
        """Others try to get it, too."""
        lock = place.lock()
        locks.extend([] if lock is None else [lock])
        return bool(locks)

    until(is_locked, "it has the lock")
    hosting = Hosting(place, locks[0], agreement.pool(config(directory)), 600.0)
    hosting.ready(has, None)

    def run() -> None:
        """It may end before the test does: it gives way."""
        hosting.run()
        hosting.close(is_left=False)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        hosting.end()
        thread.join(TIMEOUT_S)
        hosting.close(is_left=False)
        locks[0].close()


def test_a_process_that_cannot_start_the_next_owner_uses_it_when_another_does(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one has encrypted, and this process has no secret for that."""
    with contextlib.ExitStack() as stack:
        with hosted(directory, {"network": {"encrypt": True}}):
            mine = Lease(shared(directory), Place(directory))
            stack.callback(mine.close)
            assert mine.is_joined
        until(lambda: "encrypt=True needs keys" in caplog.text, "it has tried, and says why not")
        assert "the owner of this host's store cannot be started" in caplog.text
        with hosted(directory, {}):
            until(lambda: mine.joins == 2, "it looks for one still")


@pytest.mark.parametrize("is_first", [True, False])
def test_who_an_owner_has_given_way_to_looks_for_the_lock_often(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Others start the next owner if it does not. At its start, and when it has used another one
    before."""
    found: list[bool] = []

    def pause_s(_: object, __: float, *, is_awaited: bool = False) -> float:
        found.append(is_awaited)
        if is_first:
            raise InterruptedError
        return 0.001

    monkeypatch.setattr(lease.Attempts, "pause_s", pause_s)
    monkeypatch.setattr(Lease, "_start", lambda _: None)
    with contextlib.ExitStack() as stack:
        if not is_first:
            with hosted(directory, {"memory": MIB}):
                mine = Lease(shared(directory), Place(directory))
                stack.callback(mine.close)
        with hosted(directory, {"memory": 0}):
            if is_first:
                stack.enter_context(pytest.raises(InterruptedError))
                Lease(shared(directory), Place(directory))
            until(lambda: True in found, "it has given way")
    assert True in found


def test_a_bug_does_not_end_the_thread_that_looks_for_owners(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "PAUSE_S", 0.0)
    with contextlib.ExitStack() as stack:
        with hosted(directory, {}):
            mine = Lease(shared(directory), Place(directory))
            stack.callback(mine.close)
            former = mine._try

            def fail(_: float) -> bool:
                monkeypatch.setattr(mine, "_try", former)
                raise KeyError("a bug")

            monkeypatch.setattr(mine, "_start", lambda: None)
            monkeypatch.setattr(mine, "_try", fail)
        with hosted(directory, {}):
            until(lambda: mine.joins == 2, "it goes on")
    assert "a bug in the store: the owner of this host is looked for anew" in caplog.text


def test_a_process_that_does_not_begin_is_killed_and_leaves_the_lock(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_CODE", "import time; time.sleep(3600)")
    monkeypatch.setattr(starting, "FORK_TIMEOUT_S", 0.1)
    place = Place(directory)
    lock = place.lock()
    assert lock is not None
    gc.collect()  # What tests before have left must not go meanwhile.
    before = descriptors()
    with pytest.raises(OSError, match="the new process does not begin"):
        Starting(shared(directory), lock)
    assert descriptors() <= before
    lock.close()
    again = place.lock()
    assert again is not None, "the process has it no more"
    again.close()
