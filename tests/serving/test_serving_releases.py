# SPDX-License-Identifier: Apache-2.0
"""Servers of the other releases of SGLang that the package works with; a run has one of them. And a
prefill server of one release with a decode server of another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Literal

import aiohttp
import pytest
from cpu_serving.expectations import Layout, Reference, Serving
from cpu_serving.nursery import Nursery
from cpu_serving.releases import environment_of, in_release
from cpu_serving.servers import Fleet, Pair
from cpu_serving.traffic import Request, make_requests, run, send
from direct import in_a_room
from patient import patient
from serving_layouts import Case

from sglang_mooncake.sglang.releases import SERVED

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

# Far beyond what is needed, far below forever.
BOUND_S = 180.0
OTHERS = [".".join(map(str, release)) for release in SERVED[:-1]]
#: With pages of one token: before 0.5.22 SGLang has no kernel for a CPU that allocates larger ones.
LAYOUTS = {
    "tp1": Case("llama", "tp1", "tp1", chunked=True),
    # Two ranks on decode, which must agree when the pages of a failed request are free.
    "mixed": Case("llama", "tp1", "tp2"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--sglang-release", None)
    names = [asked] if asked else OTHERS
    params = [pytest.param(one, marks=pytest.mark.one_of("release", one)) for one in names]
    metafunc.parametrize("release", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def origin(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where servers of that release are forked."""
    log = tmp_path_factory.mktemp(f"nursery-{release}") / "nursery.log"
    with Nursery(environment_of(release), log) as made:
        yield made


@pytest.fixture(scope="module")
def reference(
    release: str, origin: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """One ordinary server of that release."""
    with Fleet(tmp_path_factory.mktemp(f"reference-{release}"), origin) as fleet:
        yield Reference(fleet, lambda options: in_release(options, release))


@pytest.fixture(scope="module", params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest, release: str) -> Layout:
    made = LAYOUTS[request.param].layout()
    servers = (in_release(options, release) for options in (made.prefill, made.decode))
    return Layout(f"{release}-{request.param}", made.model, *servers)


def test_it_is_that_release(serving: Serving, release: str) -> None:
    for server in (serving.pair.prefill, serving.pair.decode):
        assert f"with SGLang {release}: " in server.process.log_text()


def test_tokens_are_equal(serving: Serving) -> None:
    requests = make_requests(16, 600, seed=21)
    serving.assert_equal(requests, concurrency=8)
    serving.assert_equal(requests, concurrency=8)


def test_aborts_leave_nothing_behind(serving: Serving) -> None:
    delays = random.Random(23)
    prefill, decode = serving.pair.prefill, serving.pair.decode
    requests = [
        in_a_room(prefill, request, rid=f"abort-{i}")
        for i, request in enumerate(make_requests(24, 900, seed=22, new_tokens=32))
    ]

    async def aborted(session: aiohttp.ClientSession, request: Request) -> bool:
        """Whether the abort came before the answer."""
        sent = [asyncio.create_task(send(session, one.url, request)) for one in (prefill, decode)]
        await asyncio.sleep(delays.uniform(0, 2))
        for one in (prefill, decode):
            rid = {"rid": request.fields["rid"]}
            async with session.post(f"{one.url}/abort_request", json=rid) as response:
                assert response.status == 200
        return any(answer.error is not None for answer in await asyncio.gather(*sent))

    async def all_of_them(session: aiohttp.ClientSession) -> list[bool]:
        return await asyncio.gather(*(aborted(session, request) for request in requests))

    assert any(run(all_of_them, BOUND_S)), "every request was answered before its abort"
    serving.assert_equal(make_requests(8, 500, seed=24))


@pytest.mark.parametrize("old_role", ["prefill", "decode"])
def test_a_pair_of_two_releases(
    old_role: Literal["prefill", "decode"],
    release: str,
    origin: Nursery,
    nursery: Nursery,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A server of this release, and one of the newest."""
    made = LAYOUTS["tp1"].layout()
    folders = [tmp_path_factory.mktemp(f"{release}-{old_role}-{one}") for one in ("old", "new")]
    with Fleet(folders[0], origin) as old, Fleet(folders[1], nursery) as new:
        servers = {}
        for role, options in (("prefill", made.prefill), ("decode", made.decode)):
            is_old = role == old_role
            options = in_release(options, release) if is_old else options
            servers[role] = (old if is_old else new).server(role, patient(options))
        router = new.router(servers["prefill"], servers["decode"])
        pair = Pair(servers["prefill"], servers["decode"], router)
        pair.wait_ready()
        serving = Serving(pair, made.model, reference)
        requests = make_requests(12, 600, seed=25)
        serving.assert_equal(requests, concurrency=4)
        serving.assert_equal(requests, concurrency=4)
        serving.assert_whole()
