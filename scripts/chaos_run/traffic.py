# SPDX-License-Identifier: Apache-2.0
"""Clients: each asks over one way, again and again, what has a known answer; some leave early."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import aiohttp
from cpu_serving.traffic import Answer, Request, send

__all__ = ["Ask", "End", "Known", "Outcome", "PairAddress", "Way", "client", "through"]

End = Literal["equal", "wrong", "failed", "late", "left"]
#: Clients that leave do so within this time, in which half of the answers come: who was answered
#: before has not left.
_LEAVES_WITHIN_S = 0.4
#: After a failure, as a client would.
_PAUSE_S = 0.2
_ROOM_BITS = 62


@dataclass(frozen=True)
class Known:
    """A request, and the tokens that one ordinary server has answered."""

    request: Request
    output_ids: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """How a request ended. Times are `time.monotonic`.

    error: what the client was told, of one that failed.
    """

    way: str
    began_s: float
    ended_s: float
    end: End
    error: str = ""


Ask = Callable[[aiohttp.ClientSession, Request], "asyncio.Future[Answer] | asyncio.Task[Answer]"]


@dataclass(frozen=True)
class Way:
    """From a client to an answer.

    servers: that every request on this way needs; none where a router chooses.
    """

    name: str
    servers: frozenset[str]
    ask: Ask


@dataclass(frozen=True)
class PairAddress:
    """Two servers as a router knows them: their URLs, and the registry of the first."""

    prefill_url: str
    decode_url: str
    registry_host: str
    registry_port: int

    def in_a_room(self, request: Request) -> Request:
        """The request with what a router adds for both servers."""
        where = {
            "bootstrap_host": self.registry_host,
            "bootstrap_port": self.registry_port,
            "bootstrap_room": secrets.randbits(_ROOM_BITS),
        }
        return replace(request, fields=where)


def through(find: Callable[[], PairAddress]) -> Ask:
    """Asks a pair itself, as a router would."""

    async def both(session: aiohttp.ClientSession, request: Request) -> Answer:
        pair = find()
        request = pair.in_a_room(request)
        async with asyncio.TaskGroup() as group:
            computed = group.create_task(send(session, pair.prefill_url, request))
            answered = group.create_task(send(session, pair.decode_url, request))
            await asyncio.wait((computed, answered), return_when=asyncio.FIRST_COMPLETED)
            if computed.done() and (answer := computed.result()).error is not None:
                answered.cancel()  # it would wait for a room that its prefill never opens
                return answer
            if (answer := await answered).error is not None:
                computed.cancel()
                return answer
        return answer if computed.result().error is None else computed.result()

    return lambda session, request: asyncio.create_task(both(session, request))


async def client(
    session: aiohttp.ClientSession,
    way: Way,
    known: Sequence[Known],
    rng: random.Random,
    abort_share: float,
    deadline_s: float,
    record: Callable[[Outcome], None],
    stopping: asyncio.Event,
    may_ask: asyncio.Event,
) -> None:
    """Asks until it is to stop, and then waits for what it has asked last. All prompts come before
    any comes again, so that as many answers are always about as much work."""
    deck: list[Known] = []
    while not stopping.is_set():
        if not may_ask.is_set():
            await asyncio.sleep(_PAUSE_S)
            continue
        deck = deck or rng.sample(known, len(known))
        one = deck.pop()
        leaves_s = rng.uniform(0, _LEAVES_WITHIN_S) if rng.random() < abort_share else None
        outcome = await ask_once(session, way, one, leaves_s, deadline_s)
        record(outcome)
        if outcome.end in ("failed", "late"):
            await asyncio.sleep(_PAUSE_S)


async def ask_once(
    session: aiohttp.ClientSession,
    way: Way,
    known: Known,
    leaves_s: float | None,
    deadline_s: float,
) -> Outcome:
    """One request. leaves_s: when the client goes away; None: it waits for `deadline_s`."""
    began_s = time.monotonic()
    task = way.ask(session, known.request)
    try:
        answer = await asyncio.wait_for(task, deadline_s if leaves_s is None else leaves_s)
    except TimeoutError:
        end: End = "late" if leaves_s is None else "left"
        return Outcome(way.name, began_s, time.monotonic(), end)
    error = answer.error or ""
    if error:
        return Outcome(way.name, began_s, time.monotonic(), "failed", error)
    end = "equal" if answer.output_ids == known.output_ids else "wrong"
    return Outcome(way.name, began_s, time.monotonic(), end)
