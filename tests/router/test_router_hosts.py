# SPDX-License-Identifier: Apache-2.0
"""A server whose host is no name, beside others that work."""

from __future__ import annotations

import pytest
from router_world import World, run, until

from sglang_mooncake.router.servers import Server

#: What Python's look-up of a host raises ``UnicodeError`` for.
NO_NAMES = ["a..b", "a" * 64]


@pytest.mark.parametrize("host", NO_NAMES)
def test_a_server_whose_host_is_no_name_fails_alone(host: str) -> None:
    async def job() -> None:
        async with World(health_interval_s=0.05) as world:
            good = world.decode[0]
            bad = Server("decode", f"http://{host}:1", joined_s=0.0)
            world.servers.join(bad)
            await until(lambda: "label" in bad.why_ill)
            probes = good.probes
            await until(lambda: good.probes > probes + 1)
            status, text = await world.get("/flush_cache", "POST")
            assert (status, f"{bad}: " in text, good.url in text) == (502, True, False)
            for _ in range(2):  # They are chosen in turn.
                bad.answered()
                assert (await world.ask(text="a"))[0] == 200
            assert not bad.is_well
            assert len(good.asked) == 2

    run(job())
