# SPDX-License-Identifier: Apache-2.0
"""Times of these tests, on a machine that may hold any thread for seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from bootstrap_server import BootstrapClient

__all__ = ["NEVER_S", "WAIT_S", "no_thread_left", "patient_client", "until"]

#: Of leases and deadlines that must not end, and between what only the test itself does.
NEVER_S: Final = 1_000.0
#: What is waited for comes sooner.
WAIT_S: Final = 60.0

#: A client, as a lease makes one, whose requests wait for so long.
patient_client = partial(BootstrapClient, timeout_s=WAIT_S)


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition, with a deadline that only a hang reaches."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.005)


@contextmanager
def no_thread_left(name: str) -> Iterator[None]:
    """What begins meanwhile has no thread of that name at the end. Those of earlier tests may."""
    before = set(threading.enumerate())
    yield
    assert name not in {thread.name for thread in set(threading.enumerate()) - before}
