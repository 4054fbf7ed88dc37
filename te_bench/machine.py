# SPDX-License-Identifier: Apache-2.0
"""What a figure must be read with: the machine, and how much else it had to do."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["describe"]


def describe() -> dict[str, Any]:
    """The machine at this moment."""
    load = os.getloadavg()
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_1min": round(load[0], 2),
    }


def _field(path: str, key: str) -> str | None:
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None
