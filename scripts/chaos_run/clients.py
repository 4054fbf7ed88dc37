# SPDX-License-Identifier: Apache-2.0
"""Clients of one pair in a process of their own, so that no others wait for them.
`python -m chaos_run.clients` reads a `Spec`, a line of JSON, and prints how the requests have
ended; it stops with its standard input.
"""

from __future__ import annotations

import asyncio
import random
import sys

import aiohttp
import msgspec
from cpu_serving.traffic import Request, run

from chaos_run.traffic import Known, Outcome, PairAddress, Way, client, through

__all__ = ["Spec"]


class Spec(msgspec.Struct, frozen=True):
    """known: token ids of prompts and of their answers. way: what outcomes call it.
    abort_share, deadline_s: as in `ChaosOptions`."""

    way: str
    pair: PairAddress
    known: list[tuple[tuple[int, ...], tuple[int, ...]]]
    clients: int
    abort_share: float
    deadline_s: float
    seed: int


async def ask(session: aiohttp.ClientSession, spec: Spec) -> list[Outcome]:
    """Until nobody is there who wants to know, and the last answer has come or is late."""
    way = Way(spec.way, frozenset(), through(lambda: spec.pair))
    known = [Known(Request(asked), answer) for asked, answer in spec.known]
    stopping, may_ask, outcomes = asyncio.Event(), asyncio.Event(), list[Outcome]()
    may_ask.set()
    async with asyncio.TaskGroup() as group:
        for n in range(spec.clients):
            rng = random.Random(spec.seed * 1000 + n)
            how = (rng, spec.abort_share, spec.deadline_s, outcomes.append, stopping, may_ask)
            group.create_task(client(session, way, known, *how))
        await asyncio.to_thread(sys.stdin.buffer.read)
        stopping.set()
    return outcomes


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=Spec)
    outcomes = run(lambda session: ask(session, spec), 2 * spec.deadline_s)
    sys.stdout.buffer.write(msgspec.json.encode(outcomes))


if __name__ == "__main__":
    main()
