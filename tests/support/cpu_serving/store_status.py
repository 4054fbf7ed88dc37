# SPDX-License-Identifier: Apache-2.0
"""What processes with a part of the store have done, by their own word."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from kvstore.client.status import QUESTION, StoreStatus, status_of
from te import status

__all__ = ["outcomes", "pages_read", "statuses"]


def outcomes(directory: Path, group: int) -> Counter[str]:
    """Of all gets of a server's processes, whose process group this is. ``directory``: of the
    engines' status sockets."""
    found: Counter[str] = Counter()
    for one in statuses(directory):
        if os.getpgid(one.pid) == group:
            found.update(one.gets)
    return found


def pages_read(directory: Path, group: int) -> int:
    """Objects that came, and were what they should be."""
    return outcomes(directory, group)["right"]


def statuses(directory: Path) -> list[StoreStatus]:
    """Of all processes that have a part of the store."""
    found = []
    for live in status.running(directory):
        try:
            found.append(status_of(status.ask(live.path, QUESTION)))
        except status.StatusSocketError:
            continue  # Another engine, or a process that ends.
    return found
