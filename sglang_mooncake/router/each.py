# SPDX-License-Identifier: Apache-2.0
"""One background job for each of a number of things that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Final, TypeVar

__all__ = ["TICK_S", "one_for_each"]

#: How often it is looked who has come and gone.
TICK_S: Final = 0.25

_T = TypeVar("_T", bound=Hashable)


async def one_for_each(
    current: Callable[[], Iterable[_T]], job: Callable[[_T], Coroutine[Any, Any, None]]
) -> None:
    """Never returns. Raises what a job raises; then all of them end, as when it is cancelled."""
    jobs: dict[_T, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            there = set(current())
            for one in there - jobs.keys():
                jobs[one] = group.create_task(job(one))
            for one in jobs.keys() - there:
                jobs.pop(one).cancel()
            await asyncio.sleep(TICK_S)
