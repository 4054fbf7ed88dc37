# SPDX-License-Identifier: Apache-2.0
"""Servers of one release of SGLang, started when they are first asked for, and requests of which
some are aborted."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence

import aiohttp
from cpu_serving.expectations import Reference, Serving
from cpu_serving.model import make_model
from cpu_serving.releases import in_release
from cpu_serving.servers import Fleet, Pair, Role, Server, ServerOptions
from cpu_serving.traffic import Answer, Request, compare, run, send
from direct import in_a_room
from patient import patient
from serving_layouts import CHUNK, FORMS

from sglang_mooncake.release_numbers import text_of
from sglang_mooncake.sglang.releases import SERVED

__all__ = ["MODEL", "Servers", "neighbour", "send_and_abort", "serving_of"]

MODEL = "llama"
#: Of one release and model every prefill server serves every decode server.
Which = tuple[Role, str]
# Far beyond what is needed, far below forever.
BOUND_S = 180.0
#: As many requests are under way at a time.
CONCURRENCY = 16


class Servers:
    """Of one release. Pages have one token: before 0.5.22 SGLang has no kernel for a CPU that
    allocates larger ones."""

    def __init__(self, fleet: Fleet, release: str, *, is_installed: bool = False) -> None:
        """is_installed: it needs no folder of its own."""
        self.fleet, self.release, self._is_installed = fleet, release, is_installed
        self._found: dict[Which, Server] = {}

    def begin(self, *which: Which) -> None:
        """Starts those that have not been started, and waits for none."""
        for role, form in which:
            if (role, form) not in self._found:
                name = f"{role}-{form}-{self.release}"
                self._found[role, form] = self.fleet.server(role, self._options(form), name=name)

    def get(self, role: Role, form: str) -> Server:
        """One that is ready, or will be soon.

        form: of `serving_layouts.FORMS`.
        """
        self.begin((role, form))
        return self._found[role, form]

    def again(self, role: Role, form: str) -> Server:
        """Starts one that has ended once more, at its ports."""
        self._found[role, form] = self.fleet.again(self._found[role, form])
        return self._found[role, form]

    def _options(self, form: str) -> ServerOptions:
        options = ServerOptions(make_model(MODEL), chunked_prefill_size=CHUNK, **FORMS[form])
        options = patient(options)
        return options if self._is_installed else in_release(options, self.release)


def neighbour(release: str) -> str:
    """Of the releases that are served the one before this, or the one after the oldest."""
    numbers = tuple(map(int, re.findall(r"\d+", release)[:3]))
    older = [one for one in SERVED if one < numbers]
    return text_of(older[-1] if older else SERVED[1])


def serving_of(fleet: Fleet, prefill: Server, decode: Server, reference: Reference) -> Serving:
    """Two servers behind a router of their own, ready."""
    name = f"router of {prefill.process.name} and {decode.process.name}".replace(" ", "-")
    pair = Pair(prefill, decode, fleet.router(prefill, decode, name=name))
    pair.wait_ready()
    return Serving(pair, MODEL, reference)


def send_and_abort(
    serving: Serving, requests: Sequence[Request], share: float, within_s: float, seed: int
) -> int:
    """Sends all requests to both servers, as the router would, and asks for aborts of some of them.
    Those of which no abort was asked must be answered right, and what an abort did not reach, too.

    share: of the requests, how many are to be aborted.
    within_s: until when, counted from a request's start, its abort is asked for.

    Returns how many were aborted before their answer.
    """
    rng = random.Random(seed)
    chosen = set(rng.sample(range(len(requests)), round(share * len(requests))))
    delays = {number: rng.uniform(0, within_s) for number in sorted(chosen)}
    pair = serving.pair
    addressed = [
        in_a_room(pair.prefill, request, rid=f"{seed}-{number}")
        for number, request in enumerate(requests)
    ]

    async def one(session: aiohttp.ClientSession, number: int) -> Answer:
        request = addressed[number]
        both = (pair.prefill.url, pair.decode.url)
        sent = [asyncio.create_task(send(session, url, request)) for url in both]
        if number in delays:
            await asyncio.sleep(delays[number])
            for url in both:
                rid = {"rid": request.fields["rid"]}
                async with session.post(f"{url}/abort_request", json=rid) as response:
                    assert response.status == 200
        computed, answer = await asyncio.gather(*sent)
        return answer if computed.error is None or number in delays else computed

    async def all_of_them(session: aiohttp.ClientSession) -> list[Answer]:
        gate = asyncio.Semaphore(CONCURRENCY)

        async def in_turn(number: int) -> Answer:
            async with gate:
                return await one(session, number)

        return await asyncio.gather(*(in_turn(number) for number in range(len(addressed))))

    got = run(all_of_them, BOUND_S)
    aborted = {number for number in chosen if got[number].error}
    other = set(compare(serving.expected(requests), got)) - aborted
    assert not other, [(number, got[number].error) for number in sorted(other)]
    return len(aborted)
