# SPDX-License-Identifier: Apache-2.0
"""What an engine tells of its links, while other threads have work to do."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

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
