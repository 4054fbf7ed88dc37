# SPDX-License-Identifier: Apache-2.0
"""Threads of this process that sleep until something comes, as the kernel shows them."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from typing import Final

from te_far import wait_until

__all__ = ["TASKS", "await_sleep", "tasks"]

TASKS: Final = Path("/proc/self/task")
_CALLS: Final = {
    "x86_64": {
        0: "read",
        7: "poll",
        43: "accept",
        202: "futex",
        232: "epoll",
        271: "ppoll",
        281: "epoll",
        288: "accept",
    },
    "aarch64": {22: "epoll", 63: "read", 73: "ppoll", 98: "futex", 202: "accept", 242: "accept"},
}
"""By architecture: numbers of the calls in which threads may sleep without an end."""


def tasks() -> set[int]:
    """The threads of this process."""
    return {int(one.name) for one in TASKS.iterdir()}


def await_sleep(since: set[int], *, wakes_by_itself: bool = False) -> None:
    """Until every thread that is not of these sleeps, and no time ends that, unless it may."""
    wait_until(
        lambda: all(_sleeps(one, wakes_by_itself) for one in tasks() - since),
        "every thread sleeps until something comes",
    )


def _sleeps(task: int, wakes_by_itself: bool) -> bool:
    """Whether it sleeps in a call, and without a time-out unless that is allowed; also if it has
    ended."""
    try:
        words = (TASKS / str(task) / "syscall").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    if words[0] == "running":
        return False
    name = _CALLS[platform.machine()].get(int(words[0]))
    if name is not None and wakes_by_itself:
        return True
    third, fourth = (int(one, 16) for one in words[3:5])
    if name in ("epoll", "poll"):
        timeout_ms = fourth if name == "epoll" else third
        return ctypes.c_int32(timeout_ms & 0xFFFFFFFF).value < 0
    if name in ("futex", "ppoll"):
        return (fourth if name == "futex" else third) == 0
    return name in ("read", "accept")
