# SPDX-License-Identifier: Apache-2.0
"""Servers that the router finds in registries: they join, and they leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from router_world import FakeServer, World, answers, answers_at_once, run, until
from te_ports import held_port

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankCoords,
    RankRecord,
    Topology,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed, signed_name
from bootstrap_server.client import bootstrap_client
from bootstrap_server.http import status as status_http
from bootstrap_server.ranks.records import DEFAULT_INSTANCE, Role
from sglang_mooncake.router import membership, placement, registry_source
from sglang_mooncake.router.addresses import place_of
from sglang_mooncake.router.membership import ABSENT_S, Listed, Membership
from sglang_mooncake.router.registry_source import listed_of
from sglang_mooncake.router.servers import ROLES, Server, Servers

FIRST, ONE = RankCoords(0, 0, 0, 0), Topology(1, 1, 1, 1)
CONFIG = InstanceConfig(ONE, KVFormat(16, "bfloat16"), protocol=1)
KEYS = Keys.from_secrets([b"0123456789abcdef" * 4])
NO_KEYS = Keys()
#: Of the registry of each prefill server.
PORT = 8998


def name_of(fake: FakeServer) -> str:
    """At a registry beside its own."""
    return f"127.0.0.1-{PORT if fake.role == 'prefill' else fake.port}"


def record_of(fake: FakeServer, keys: Keys = NO_KEYS, name: str | None = None) -> RankRecord:
    """As its rank registers it."""
    if fake.role == "prefill":
        rank = Rank(FIRST, "127.0.0.1", 4711, 1, fake.port)
    else:
        rank = Rank(FIRST, "127.0.0.1", fake.port, 1)
    name = name_of(fake) if name is None else name
    return signed(RankRecord(CONFIG, rank), keys.record, signed_name(name, fake.role))


def client_of(registry: BootstrapServer, fake: FakeServer, keys: Keys = NO_KEYS) -> BootstrapClient:
    address = f"127.0.0.1:{registry.port}"
    return BootstrapClient(
        address, 20.0, instance=name_of(fake), role=fake.role, keys=keys.registry
    )


def register(registry: BootstrapServer, *fakes: FakeServer, keys: Keys = NO_KEYS) -> None:
    for fake in fakes:
        with client_of(registry, fake, keys) as client:
            client.register(record_of(fake, keys))


def release(registry: BootstrapServer, fake: FakeServer) -> None:
    with client_of(registry, fake) as client:
        client.release(record_of(fake).rank)


def urls(servers: Sequence[Server]) -> set[str]:
    return {one.url for one in servers}


async def told(world: World) -> dict[str, Any]:
    """What the router tells of its registry."""
    _, text = await world.get("/v1/router")
    return dict(json.loads(text)["registries"][0])


async def told_why(world: World, words: str) -> None:
    """Waits until the router tells so of its registry."""
    while words not in (await told(world))["why"]:
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_source, "ASK_S", 0.02)


def test_servers_are_served_once_they_are_well_and_leave_when_they_are_gone() -> None:
    async def job() -> None:
        with BootstrapServer("127.0.0.1", 0, lease_s=1000.0) as registry:
            address = f"127.0.0.1:{registry.port}"
            world = World(
                2,
                1,
                are_named=False,
                registries=(address,),
                prefill_policy="cache_aware",
                health_interval_s=0.05,
            )
            async with world:
                first, second = world.prefill
                assert "no prefill server has joined" in (await world.get("/readiness"))[1]
                first.health = 503
                await asyncio.to_thread(register, registry, first, world.decode[0])
                await until(lambda: world.decode[0].probes and first.probes)
                assert (await world.get("/readiness"))[0] == 503
                first.health = 200
                await until(lambda: all(world.servers.usable(role) for role in ROLES))
                assert (await world.ask(text="a"))[0] == 200
                asked = first.asked[0]
                assert (asked["bootstrap_host"], asked["bootstrap_port"]) == ("127.0.0.1", PORT)
                # Another one that names the same registry is another server.
                second_record = record_of(second, name="127.0.0.2-8999")

                def join() -> None:
                    with BootstrapClient(address, 20.0, instance="127.0.0.2-8999") as client:
                        client.register(second_record)

                await asyncio.to_thread(join)
                await until(lambda: len(world.servers.usable("prefill")) == 2)
                assert urls(world.servers.of("prefill")) == {first.url, second.url}
                assert len(world.views) == 2
                await first.stop()
                await asyncio.to_thread(release, registry, first)
                await until(lambda: urls(world.servers.of("prefill")) == {second.url})
                assert len(world.views) == 1
                assert (await world.ask(text="a"))[0] == 200
                assert second.asked[-1]["bootstrap_port"] == 8999

    run(job())


def test_a_registry_that_is_killed_or_begins_anew_ends_no_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_source, "SILENT_S", 0.1)
    caplog.set_level("INFO")

    async def job() -> None:
        with ExitStack() as undo:
            port = undo.enter_context(held_port())
            registry = undo.enter_context(BootstrapServer("127.0.0.1", port, lease_s=1000.0))
            async with World(are_named=False, registries=(f"127.0.0.1:{port}",)) as world:
                await asyncio.to_thread(register, registry, *world.prefill, *world.decode)
                await until(lambda: all(world.servers.usable(role) for role in ROLES))
                registry.close()
                await told_why(world, "cannot be reached")
                await until(lambda: "does not answer, so the router goes on" in caplog.text)
                assert (await world.ask(text="a"))[0] == 200
                caplog.clear()  # A thread of the registry may have been late before that, too.
                again = undo.enter_context(BootstrapServer("127.0.0.1", port, lease_s=1000.0))
                await until(lambda: "answers again" in caplog.text)
                assert (await world.ask(text="a"))[0] == 200
                assert len(world.servers.all()) == 2
                _, lines = await world.get("/metrics")
                name = "sglang_mooncake_router_registry_servers"
                assert f'{name}{{registry="127.0.0.1:{port}"}} 0' in lines
                await asyncio.to_thread(register, again, *world.prefill, *world.decode)
                while (await told(world))["servers"] != 2:
                    await asyncio.sleep(0.01)

    run(job())


def test_a_registry_that_stands_still_ends_no_server(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port takes connections, as that of a process that was stopped, and nobody answers."""
    monkeypatch.setattr(registry_source, "SILENT_S", 0.1)

    async def job() -> None:
        with ExitStack() as undo:
            port = undo.enter_context(held_port())
            registry = undo.enter_context(BootstrapServer("127.0.0.1", port, lease_s=1000.0))
            async with World(are_named=False, registries=(f"127.0.0.1:{port}",)) as world:
                await asyncio.to_thread(register, registry, *world.prefill, *world.decode)
                await until(lambda: all(world.servers.usable(role) for role in ROLES))
                registry.close()
                with socket.create_server(("127.0.0.1", port)):
                    await told_why(world, "timed out")
                    await until(lambda: "does not answer, so the router goes on" in caplog.text)
                    assert (await world.ask(text="a"))[0] == 200

    run(job())


def test_a_registry_with_a_secret_and_records_of_others(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        with BootstrapServer("127.0.0.1", 0, lease_s=1000.0, keys=KEYS.registry) as registry:
            address = f"127.0.0.1:{registry.port}"
            async with World(2, 1, are_named=False, registries=(address,), keys=KEYS) as world:
                good, bad = world.prefill
                decode = world.decode[0]

                def others() -> None:
                    # Signed as a prefill server, and not at all.
                    for role, record in (
                        ("decode", record_of(bad, KEYS)),
                        ("prefill", RankRecord(CONFIG, Rank(FIRST, "127.0.0.1", 1, 1, bad.port))),
                    ):
                        with BootstrapClient(
                            address, 20.0, instance="b-1", role=role, keys=KEYS.registry
                        ) as client:
                            client.register(record)

                await asyncio.to_thread(others)
                await asyncio.to_thread(register, registry, good, decode, keys=KEYS)
                await until(lambda: len(world.servers.all()) == 2)
                assert urls(world.servers.all()) == {good.url, decode.url}
                assert caplog.text.count("a server cannot be used") == 2
            async with World(1, 1, are_named=False, registries=(address,)) as world:
                await told_why(world, "start this one with the same SGLANG")
                assert world.servers.all() == ()

    run(job())


@pytest.mark.parametrize("path", ["/server_info", "/health_generate", "/flush_cache"])
def test_a_server_may_join_or_leave_during_a_question_to_all(path: str) -> None:
    async def job() -> None:
        async with World(2, 1) as world:
            world.decode[0].is_slow = True
            asked = asyncio.create_task(world.get(path))
            await until(lambda: any(at == path for at, _ in world.decode[0].others))
            world.servers.leave(world.known(world.prefill[0]))
            world.servers.join(Server("decode", "http://127.0.0.1:1"))
            world.decode[0].is_slow = False
            assert (await asked)[0] == 200

    run(job())


def test_a_request_ends_well_though_its_server_leaves_meanwhile() -> None:
    async def job() -> None:
        gate = asyncio.Event()

        async def later(
            server: FakeServer, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            await gate.wait()
            return await answers_at_once(server, request, body)

        with BootstrapServer("127.0.0.1", 0, lease_s=1000.0) as registry:
            async with World(
                are_named=False,
                registries=(f"127.0.0.1:{registry.port}",),
                prefill_policy="cache_aware",
                health_interval_s=0.05,
            ) as world:
                await asyncio.to_thread(register, registry, *world.prefill, *world.decode)
                await until(lambda: world.servers.usable("prefill"))
                server = world.known(world.prefill[0])
                world.prefill[0].answer = later
                asked = asyncio.create_task(world.ask(text="a"))
                await until(lambda: world.prefill[0].asked)
                world.prefill[0].health = 503
                await asyncio.to_thread(release, registry, world.prefill[0])
                await until(lambda: not world.views)
                gate.set()
                assert (await asked)[0] == 200
                await until(lambda: server.under_way == 0)

    run(job())


# --- the rules ---

URLS = ["http://a:1", "http://b:2", "http://B:2/", "http://c:3"]
LISTED = st.builds(
    Listed,
    st.sampled_from(["prefill", "decode"]),
    st.sampled_from(URLS),
    st.none(),
    st.sampled_from([None, 1, 2]),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["r", "s"]),
        st.lists(LISTED, max_size=4),
        st.floats(0.0, 2 * ABSENT_S),
        st.sets(st.sampled_from(URLS)),
    ),
    max_size=8,
)


@given(steps=STEPS)
def test_a_server_is_there_once_and_as_it_is_listed(
    steps: list[tuple[str, list[Listed], float, set[str]]],
) -> None:
    named = Server("prefill", "http://a:1")
    servers = Servers([named])
    members, last, now_s = Membership(servers), dict[str, list[Listed]](), 0.0
    for registry, listed, later_s, ill in steps:
        now_s += later_s
        for server in servers.all():
            if server.url in ill:
                server.failed("gone", now_s, 1)
            else:
                server.answered()
        before = set(servers.all())
        last[registry] = listed
        members.told(registry, listed)
        change = members.settle(now_s)
        after = set(servers.all())
        assert set(change.joined) == after - before
        assert set(change.left) == before - after
        there = {place_of(server.url): server for server in after}
        assert len(there) == len(after)
        assert there.pop(place_of(named.url)) is named
        assert not any(one.is_well for one in change.joined)
        told = {(place_of(one.url), *one.record) for each in last.values() for one in each}
        assert {place for place, *_ in told} <= {place_of(named.url), *there}
        for place, server in there.items():
            listed_as = place, server.role, server.bootstrap_port, None
            assert listed_as in told or (server in before and server.is_well)
        assert members.settle(now_s) == membership.Change((), (), ())


def test_who_is_listed_no_more_and_answers_leaves_late() -> None:
    servers = Servers(())
    members = Membership(servers)
    members.told("r", [Listed("decode", "http://a:1")])
    (server,) = members.settle(0.0).joined
    server.answered()
    members.told("r", [])
    assert members.settle(1.0).left == ()
    assert members.settle(ABSENT_S).left == ()
    assert members.settle(1.0 + ABSENT_S).left == (server,)


def test_a_server_at_two_registries_stays_whichever_of_them_answers() -> None:
    """They know its own registry by two addresses."""
    servers = Servers(())
    members = Membership(servers)
    one = Listed("prefill", "http://a:1", "a", 8998)
    other = Listed("prefill", "http://A:1", "10.0.0.1", 8998)
    members.told("r", [one])
    members.told("s", [other])
    (server,) = members.settle(0.0).joined
    server.answered()
    nothing = membership.Change((), (), ())
    for now_s, listed in enumerate([[], [one], [other, one], []]):
        members.told("r", listed)
        assert members.settle(float(now_s)) == nothing
    # A record that nobody confirms is an old one some day.
    assert members.settle(2.0 + ABSENT_S) == nothing
    change = members.settle(3.0 + ABSENT_S)
    assert change.left == (server,)
    assert [joined.bootstrap_host for joined in change.joined] == ["10.0.0.1"]
    members.told("r", [one])
    assert members.settle(4.0 + ABSENT_S) == nothing


@pytest.mark.parametrize("earlier", ["r", "s"])
def test_a_server_that_its_registry_lists_otherwise_was_started_again(earlier: str) -> None:
    """What another registry still has of the former one does not count."""
    servers = Servers(())
    members = Membership(servers)
    old, new = (Listed("prefill", "http://a:1", "a", port) for port in (8998, 8999))
    members.told(earlier, [])
    members.told("r", [old])
    (server,) = members.settle(0.0).joined
    server.answered()
    members.told("s", [old])
    assert members.settle(0.5).left == ()
    members.told("r", [new])
    change = members.settle(1.0)
    assert change.left == (server,)
    assert [joined.bootstrap_port for joined in change.joined] == [8999]


def test_a_server_that_is_known_by_another_port_alone_was_started_again() -> None:
    servers = Servers(())
    members = Membership(servers)
    old, new = (Listed("prefill", "http://a:1", "a", port) for port in (8998, 8999))
    members.told("r", [old])
    (server,) = members.settle(0.0).joined
    server.answered()
    members.told("r", [])
    members.told("s", [new])
    assert members.settle(1.0).left == (server,)


def test_two_roles_of_one_server_are_told_once() -> None:
    members = Membership(Servers([Server("prefill", "http://a:1")]))
    members.told("r", [Listed("decode", "http://a:1")])
    (sentence,) = members.settle(0.0).refused
    assert "http://a:1 is a decode server by the registry at r" in sentence
    assert members.settle(1.0).refused == ()


def instance(host: str, http_port: int | None) -> Instance:
    return Instance(CONFIG, 1, (Rank(FIRST, host, 4711, 1, http_port),))


@pytest.mark.parametrize(
    ("role", "name", "host", "listed"),
    [
        ("prefill", DEFAULT_INSTANCE, "10.0.0.1", ("http://10.0.0.1:30000", "reg", 7)),
        ("prefill", "10.0.0.1-8998", "10.0.0.1", ("http://10.0.0.1:30000", "10.0.0.1", 8998)),
        ("prefill", "ifd00--1--8998", "fd00::1", ("http://[fd00::1]:30000", "[fd00::1]", 8998)),
        ("decode", "x", "10.0.0.1", ("http://10.0.0.1:4711", None, None)),
    ],
)
def test_where_requests_for_a_listed_server_go(
    role: Role, name: str, host: str, listed: tuple[str, str | None, int | None]
) -> None:
    assert listed_of(role, name, instance(host, 30_000), "reg:7")[1:] == listed


@pytest.mark.parametrize(
    ("name", "port", "why"),
    [("default", None, "at which port"), ("a-0", 30_000, "not named by the address of its own")],
)
def test_a_server_that_cannot_be_asked_is_said_so(name: str, port: int | None, why: str) -> None:
    with pytest.raises(BootstrapError, match=why):
        listed_of("prefill", name, instance("10.0.0.1", port), "reg:7")


@pytest.mark.parametrize(
    "host", ["a..b", "a" * 64, ".", "x[", "[::1", "a@b", "a/b", "a?b", "a#b", "a:b", "::1%", "é"]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_whose_host_is_no_host_is_not_listed(role: Role, host: str) -> None:
    with pytest.raises(BootstrapError, match="neither an IP address nor a host name"):
        listed_of(role, "10.0.0.1-8998", instance(host, 30_000), "reg:7")


LABEL = st.text("abcXYZ019_-", min_size=1, max_size=63)


@given(host=st.one_of(st.lists(LABEL, min_size=1, max_size=3).map(".".join), st.ip_addresses()))
def test_a_listed_url_is_of_the_host_that_is_listed(host: object) -> None:
    url = listed_of("decode", "x", instance(str(host), None), "reg:7").url
    assert (urlsplit(url).hostname, urlsplit(url).port) == (str(host).lower(), 4711)


@given(host=st.text(st.characters(codec="ascii", exclude_categories=["Cc", "Zs"]), min_size=1))
def test_whatever_host_is_listed_the_url_is_of_it(host: str) -> None:
    try:
        url = listed_of("decode", "x", instance(host[:255], None), "reg:7").url
    except BootstrapError:
        return
    assert (urlsplit(url).hostname, urlsplit(url).port) == (host.lower(), 4711)


def test_a_server_with_a_bad_host_keeps_no_other_from_joining(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def job() -> None:
        with BootstrapServer("127.0.0.1", 0, lease_s=1000.0) as registry:
            address = f"127.0.0.1:{registry.port}"
            async with World(are_named=False, registries=(address,)) as world:

                def bad() -> None:
                    with BootstrapClient(address, 20.0, instance="a", role="decode") as client:
                        client.register(RankRecord(CONFIG, Rank(FIRST, "x[", 1, 1)))

                await asyncio.to_thread(bad)
                await until(lambda: "has the host 'x['" in caplog.text)
                await asyncio.to_thread(register, registry, *world.prefill, *world.decode)
                await until(lambda: len(world.servers.all()) == 2)

    run(job())


@pytest.mark.parametrize("is_old", [False, True])
def test_a_registry_shows_the_router_unless_it_is_of_an_older_release(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_http, "PUBLISH_EVERY_S", 0.02)
    monkeypatch.setattr(placement, "LEARNT", 0)
    if is_old:
        monkeypatch.setattr(bootstrap_client, "ROUTERS_PATH", "/v1/unknown")

    async def job() -> None:
        with BootstrapServer("127.0.0.1", 0, lease_s=1000.0) as registry:
            address = f"127.0.0.1:{registry.port}"
            async with World(
                are_named=False,
                registries=(address,),
                port=8000,
                prefill_policy="cache_aware",
                health_interval_s=0.05,
            ) as world:
                told = {"meta_info": {"prompt_tokens": 8, "cached_tokens": 3}}
                world.prefill[0].answer = answers(told)
                fakes = (world.prefill[0], world.decode[0])
                await asyncio.to_thread(register, registry, *fakes)
                await until(lambda: all(world.servers.usable(role) for role in ROLES))
                assert (await world.ask(text="a"))[0] == 200
                await world.idle()

                async def shown() -> list[dict[str, Any]]:
                    async with world.client.get(f"http://{address}/v1/status") as answer:
                        return list((await answer.json())["routers"])

                if is_old:
                    assert await shown() == []
                    return
                while not (found := await shown()) or found[0]["cached_tokens"] != 3:
                    await asyncio.sleep(0.005)
                assert (found[0]["port"], found[0]["answered"]) == (8000, 1)
                assert found[0]["prefill"] == found[0]["decode"] == {"well": 1, "all": 1}
                assert found[0]["error"] is not None

    run(job())
