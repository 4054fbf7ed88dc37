# SPDX-License-Identifier: Apache-2.0
"""One processor of the host for each kernel.

A user-mode Linux has one processor, but it is many processes of the host: the kernel's own and one
for each address space inside, which hand over to each other by ptrace at each system call and page
fault. Where the host's scheduler puts them on two processors, each of these hand-overs wakes a
processor that sleeps: on a virtual machine ``import torch`` takes 26 to 41 s inside, and 7 to 9 s
when all of them share one.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["own_processor"]


@contextmanager
def own_processor(locks: Path) -> Iterator[int]:
    """The number of a processor that this process may use, for as long as the context lasts.

    Kernels that run at once get different ones, by files in ``locks``; with more kernels than
    processors, the rest share those by chance.
    """
    allowed = sorted(os.sched_getaffinity(0))
    for number in allowed:
        with (locks / f"processor-{number}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield number
            return
    yield allowed[os.getpid() % len(allowed)]
