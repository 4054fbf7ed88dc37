# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its links, while other threads have work to do."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

from te_far import wait_until

import te

PEERS = 200
TIMEOUT_S = 60.0


def test_other_threads_run_between_two_links():
    """No thread is made to give the interpreter up here: it has to do so itself. Whether the other
    one has a core by then is the kernel's choice, so they are asked for again."""
    told: list[int] = []
    seen: set[int] = set()
    over = threading.Event()

    def look():
        while not over.is_set():
            seen.add(len(told) % PEERS)
            time.sleep(0)

    other = threading.Thread(target=look)
    before = sys.getswitchinterval()
    with te.Engine(te.Config(transports=("tcp",), status_dir=None)) as engine:
        peers = [SimpleNamespace(stats=lambda: told.append(1)) for _ in range(PEERS)]
        engine._live_peers = lambda: peers
        sys.setswitchinterval(1000.0)
        try:
            other.start()
            give_up_s = time.monotonic() + TIMEOUT_S
            while len(seen - {0}) <= PEERS // 10 and time.monotonic() < give_up_s:
                assert len(engine.links()) == PEERS
        finally:
            sys.setswitchinterval(before)
            over.set()
            other.join()
        engine._live_peers = list
    assert len(seen - {0}) > PEERS // 10


def hold_sockets(undo):
    """Has every socket of this process open once more, as a child has until it executes another
    program."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if path.is_socket():
            with suppress(OSError):  # closed meanwhile
                undo.callback(os.close, os.dup(int(path.name)))


def watched():
    """How many descriptors the workers of all engines here wait for."""
    count = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            if str(path.readlink()) == "anon_inode:[eventpoll]":
                told = Path("/proc/self/fdinfo", path.name).read_text()
                count += sum(line.startswith("tfd:") for line in told.splitlines())
    return count


def test_a_connection_that_a_child_has_too_ends_for_its_worker():
    """Epoll goes on to tell of a descriptor that is closed here and open there."""
    config = te.Config(transports=("tcp",), rails=1)
    with te.Engine(config) as source, te.Engine(config) as target:
        before = watched()
        peer = source.connect(target.card())
        wait_until(lambda: watched() == before + 2, "both ends are watched")
        with ExitStack() as undo:
            hold_sockets(undo)
            peer.close()
            wait_until(lambda: watched() == before + 1, "the closed end is not")
        wait_until(lambda: watched() == before, "the other one has ended, too")
        assert source.connect(target.card()).alive
