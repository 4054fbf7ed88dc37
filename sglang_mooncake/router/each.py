# SPDX-License-Identifier: Apache-2.0
"""Background jobs that are kept up, and one of them for each of a number of things that come and
go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from typing import Final, TypeVar

__all__ = ["TICK_S", "kept_up", "one_for_each"]

logger = logging.getLogger(__name__)

#: How often it is looked who has come and gone.
TICK_S: Final = 0.25
#: A background job that has failed begins again after so long.
BEGIN_AGAIN_S: Final = 5.0

_T = TypeVar("_T", bound=Hashable)


async def kept_up(what: str, job: Callable[[], Awaitable[None]]) -> None:
    """Never returns. The job begins again where it ends, which is a mistake of the router's:
    without it no server that is ill would be well again."""
    while True:
        try:
            await job()
        except Exception:
            logger.exception("%s has failed and begins again in %g s", what, BEGIN_AGAIN_S)
        await asyncio.sleep(BEGIN_AGAIN_S)


async def one_for_each(
    what: str, current: Callable[[], Iterable[_T]], job: Callable[[_T], Awaitable[None]]
) -> None:
    """Never returns. A job that fails begins again, and the others go on meanwhile. ``what`` it
    does stands in the log, before the one that it is for."""
    jobs: dict[_T, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            there = set(current())
            for one in there - jobs.keys():
                jobs[one] = group.create_task(kept_up(f"{what} {one}", partial(job, one)))
            for one in jobs.keys() - there:
                jobs.pop(one).cancel()
            await asyncio.sleep(TICK_S)
