# SPDX-License-Identifier: Apache-2.0
"""How long others are waited for. The time for which the event loop stood still is not theirs.

On a busy machine hundreds of requests that come together keep the loop for seconds. What was done
in time by others is seen only afterwards, and a timer that is looked at first would say that it was
not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

__all__ = ["within"]

T = TypeVar("T")
#: What others do for a router takes a few turns of the loop: these are more, and however long one
#: of them lasts, it counts as one.
TURNS: Final = 20


async def within(limit_s: float, job: Coroutine[Any, Any, T]) -> T:
    """What it returns; ``TimeoutError`` after so long. Where the caller is cancelled, what the job
    returns just then is lost."""
    doing = asyncio.ensure_future(job)
    doing.add_done_callback(_seen)
    try:
        for _ in range(TURNS):
            await asyncio.wait({doing}, timeout=limit_s / TURNS)
            if doing.done():
                return doing.result()
        raise TimeoutError
    finally:
        doing.cancel()


def _seen(doing: asyncio.Task[Any]) -> None:
    """Also where nobody waits for it any more."""
    if not doing.cancelled():
        doing.exception()
