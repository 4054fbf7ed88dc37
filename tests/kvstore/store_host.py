# SPDX-License-Identifier: Apache-2.0
"""The owner of a host as tests find it, and processes that use one.

python store_host.py DIRECTORY MEMORY COUNT NBYTES
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from store_makers import TIMEOUT_S, config, until
from store_objects import MIB, filled

from kvstore.config import Config
from kvstore.host import agreement
from kvstore.host.directory import Directory
from kvstore.host.hosting import Hosting
from kvstore.host.messages import BYTES_MAX, Join, Message, decode, encode
from kvstore.host.place import Place
from kvstore.owning import OwningStore
from kvstore.protocol.messages import VERSION
from kvstore.store import Store

LINGER_S = 600.0


def shared(directory: Path, memory: int = 16 * MIB, **more: Any) -> Config:
    """Of a process that uses the host's owner."""
    return config(directory, memory, **more)


def pid_of(store: Store) -> int:
    """The owner that a store uses. Waits for the connection: what is stored between two owners
    gets nowhere."""
    lease = store._lease
    assert lease is not None
    until(store._owners.usable, "it is connected to an owner")
    return lease.pid


def pids(directory: Path) -> list[int]:
    """Owners that servers have started in a directory, or below it, which live."""
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdecimal():
            try:
                words = (one / "cmdline").read_bytes().split(b"\0")
                # What forks an owner is one for a moment, too, and leads its session.
                leads = os.getsid(int(one.name)) == int(one.name)
            except OSError:
                continue
            is_there = any(word.startswith(os.fsencode(directory)) for word in words)
            is_owner = b"-c" in words and is_there and not leads
            if is_owner and is_alive(int(one.name)):
                found.append(int(one.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether any thread of a process runs: the first one may have ended before the others, and
    waits for its parent behind them all."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    return any(map(_runs, threads))


def _runs(thread: Path) -> bool:
    try:
        state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kill(pid: int) -> None:
    """Returns when it has ended, with all of its threads. It may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid), "it has ended")


def freeze(pid: int) -> None:
    """Returns when all of its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _states(pid) == {"T"}, "it stands still")


def _states(pid: int) -> set[str]:
    """Of its threads."""
    found = set()
    for one in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(one.read_text().rpartition(")")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):
            found.add("")  # A thread that has just ended: the signal had not come yet.
    return found


def end_all(directory: Path) -> None:
    """Behind a test. None may come back: nobody uses them any more."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while found := pids(directory):
        assert time.monotonic() < deadline_s
        for one in found:
            kill(one)


@contextmanager
def store_directory() -> Iterator[Path]:
    """Of one test or file alone, and short enough for sockets. Owners of it end behind that."""
    with tempfile.TemporaryDirectory(prefix="kv") as path:
        try:
            yield Path(path)
        finally:
            end_all(Path(path))


@contextmanager
def owner_here(config: Config) -> Iterator[OwningStore]:
    """The owner of a host in this process; others use it meanwhile."""
    with contextlib.closing(Directory(config.directory)):
        place = Place(config.directory)
        lock = place.lock()
        assert lock is not None
        with contextlib.closing(lock), OwningStore(config) as store:
            hosting = Hosting(place, lock, agreement.pool(config), None)
            try:
                with store.answering(place.calls):
                    hosting.ready(agreement.wishes(config), None)
                    thread = threading.Thread(target=hosting.run)
                    thread.start()
                    try:
                        yield store
                    finally:
                        hosting.end()
                        thread.join(TIMEOUT_S)
            finally:
                hosting.close(is_left=False)


class User:
    """A process that uses the host's owner, from outside."""

    def __init__(self, directory: Path, memory: int = 16 * MIB) -> None:
        """Returns when it has joined."""
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(directory), str(memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["joined"], words
        self.owner = int(words[1])

    def kill(self) -> None:
        """With its whole process group, as who ends a server does. Idempotent."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()


def dial(place: Place) -> socket.socket:
    """A line to the owner of a host."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(TIMEOUT_S)
    line.connect(str(place.socket))
    return line


def join(directory: Path, memory: str = "", was: dict[str, object] | None = None) -> Join:
    """A question whether a process may use the owner."""
    mine = config(directory)
    return Join(VERSION, agreement.wishes(mine), agreement.pool(mine), memory, was or {})


def send(line: socket.socket, message: Message, fds: list[int]) -> None:
    """Says something, with descriptors."""
    socket.send_fds(line, [encode(message)], fds)


def receive(line: socket.socket) -> tuple[Message, list[int]]:
    """What the other side says, and the descriptors that come along."""
    raw, fds, _, _ = socket.recv_fds(line, BYTES_MAX, 1)
    return decode(raw), list(fds)


def main() -> None:
    with Store(shared(Path(sys.argv[1]), int(sys.argv[2]))) as store:
        filled(store)
        until(lambda: pid_of(store), "the owner is joined")
        print("joined", pid_of(store), flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
