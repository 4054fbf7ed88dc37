# SPDX-License-Identifier: Apache-2.0
"""Test support: waits that leave the processor to who is waited for.

SGLang's scheduler looks for a hand-over that is under way again and again without a pause, and
vLLM's processes do so for each other's messages for a second. With a core for each of them that
costs nothing. The servers of tests share two cores, and there such a scheduler took 76 % of one;
one without requests took 2.4 %, most of it Gloo's. With `CPU_SERVING_REST=1` they pause.
"""

from __future__ import annotations

import functools
import os
import time
from types import ModuleType
from typing import Any

__all__ = ["pause_between_looks", "rest_when_idle", "share_a_loop"]

VARIABLE = "CPU_SERVING_REST"
#: Between two looks of a scheduler. A hand-over takes a few looks, and a prompt tens of ms.
REST_S = 0.002
#: Between two looks for a message of vLLM's. A step of its engine takes four of them, one after
#: the other.
PAUSE_S = 0.0005


def _rests() -> bool:
    return os.environ.get(VARIABLE) == "1"


def rest_when_idle(module: ModuleType) -> None:
    """For SGLang's `managers.scheduler`: of a round that had nothing to compute."""
    on_idle = module.Scheduler.on_idle

    @functools.wraps(on_idle)
    def wrapped(scheduler: Any) -> None:
        on_idle(scheduler)
        if _rests():
            time.sleep(REST_S)

    module.Scheduler.on_idle = wrapped


def pause_between_looks(module: ModuleType) -> None:
    """For vLLM's `shm_broadcast`: who has read within a second looks again and again, without a
    pause. It does not rely on notices then, as its writers drop some: nor does this."""
    wait = module.SpinCondition.wait

    @functools.wraps(wait)
    def wrapped(condition: Any, *args: Any, **kwargs: Any) -> None:
        if _rests() and time.monotonic() <= condition.last_read + condition.busy_loop_s:
            time.sleep(PAUSE_S)
        else:
            wait(condition, *args, **kwargs)

    module.SpinCondition.wait = wrapped


def share_a_loop(module: ModuleType) -> None:
    """For torch's `distributed_c10d`: all groups of a process over Gloo have one device. Each has a
    thread that looks for messages a hundred times a second, and a scheduler has ten groups."""
    gloo = module.ProcessGroupGloo
    init = gloo.__init__

    @functools.cache
    def device_of(_pid: int) -> Any:
        """A process that is forked has none of the threads of the one before it."""
        return gloo.create_default_device()

    @functools.wraps(init)
    def wrapped(group: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        if not _rests():
            init(group, store, rank, size, timeout=timeout)
            return
        options = gloo._Options()
        options._devices, options._timeout = [device_of(os.getpid())], timeout
        init(group, store, rank, size, options)

    gloo.__init__ = wrapped
