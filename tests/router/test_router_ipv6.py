# SPDX-License-Identifier: Apache-2.0
"""Servers, registries and the router at IPv6 addresses. KV events: `test_router_events.py`, the
process: `test_router_process.py`."""

from __future__ import annotations

import asyncio

import pytest
from router_world import World, run, until
from test_router_registry import CONFIG, FIRST

from bootstrap_server import BootstrapClient, BootstrapServer, Rank, RankRecord, instance_name_of
from sglang_mooncake.router import registry_source
from sglang_mooncake.router.servers import ROLES

HOST = "::1"


def test_a_request_goes_to_servers_at_ipv6_addresses() -> None:
    async def job() -> None:
        async with World(2, 2, host=HOST) as world:
            assert world.url.startswith("http://[::1]:")
            status, events = await world.ask(text="a", stream=True)
            assert (status, events[-1], events[-2]["output_ids"]) == (
                200,
                "[DONE]",
                [100, 101, 102],
            )
            (server,) = [one for one in world.decode if one.asked]
            # In brackets, as SGLang's mini-lb names it.
            assert server.asked[0]["bootstrap_host"] == "[::1]"
            assert server.headers[0]["Host"] == f"[::1]:{server.port}"
            assert (await world.get("/flush_cache", "POST"))[0] == 200
            assert all(one.others for one in (*world.prefill, *world.decode))

    run(job())


@pytest.mark.parametrize("named", ["[::1]", "[0:0:0:0:0:0:0:1]"])
def test_a_registry_at_an_ipv6_address_lists_servers_at_others(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_source, "ASK_S", 0.02)

    async def job() -> None:
        with BootstrapServer(HOST, 0, lease_s=1000.0) as registry:
            address = f"{named}:{registry.port}"
            async with World(host=HOST, are_named=False, registries=(address,)) as world:
                (prefill,), (decode,) = world.prefill, world.decode

                def join() -> None:
                    rank = Rank(FIRST, HOST, 4711, 1, prefill.port)
                    with BootstrapClient(
                        address, 20.0, instance=instance_name_of(f"[{HOST}]:8998")
                    ) as client:
                        client.register(RankRecord(CONFIG, rank))
                    rank = Rank(FIRST, HOST, decode.port, 1)
                    with BootstrapClient(address, 20.0, instance="one", role="decode") as client:
                        client.register(RankRecord(CONFIG, rank))

                await asyncio.to_thread(join)
                await until(lambda: all(world.servers.usable(role) for role in ROLES))
                assert (await world.ask(text="a"))[0] == 200
                assert decode.asked[0]["bootstrap_host"] == "[::1]"
                assert decode.asked[0]["bootstrap_port"] == 8998

    run(job())
