# SPDX-License-Identifier: Apache-2.0
"""Time that the event loop stood still is not that of those whom it waits for."""

from __future__ import annotations

import asyncio
import threading

import pytest
from router_world import World, run, stand_still, until

from sglang_mooncake.router.patience import within


def test_what_was_done_in_time_counts_however_long_the_loop_stood_still() -> None:
    async def job() -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def stands_still_meanwhile() -> None:
            other = threading.Thread(target=loop.call_soon_threadsafe, args=(done.set,))
            other.start()
            other.join()
            stand_still(0.1)

        loop.call_soon(stands_still_meanwhile)
        await within(0.05, done.wait())

    run(job())


def test_others_are_not_waited_for_longer_than_that() -> None:
    ended = list[str]()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("never")

    async def fails() -> None:
        raise OSError("gone")

    async def job() -> None:
        with pytest.raises(TimeoutError):
            await within(0.05, never())
        with pytest.raises(OSError, match="gone"):
            await within(60.0, fails())
        waiting = asyncio.create_task(within(60.0, never()))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: ended == ["never", "never"])
        assert waiting.cancelled()

    run(job())


def test_a_server_is_not_ill_because_the_router_stood_still() -> None:
    async def job() -> None:
        times = {"health_interval_s": 0.0, "health_timeout_s": 0.1, "health_failures": 1}
        async with World(**times) as world:
            decode = world.decode[0]
            for probes in range(2, 6):
                await until(lambda: decode.probes >= probes)  # noqa: B023
                stand_still(0.15)
            await until(lambda: decode.probes > probes)
            assert world.known(decode).counts.failed == 0

    run(job())
