# SPDX-License-Identifier: Apache-2.0
"""Many clients more, who all leave soon: each of their requests is two control messages or more.
`python -m chaos_run.crowd` reads a `Spec` in JSON and prints how the requests have ended; it is a
process of its own so that other clients do not wait for these.
"""

from __future__ import annotations

import asyncio
import random
import sys

import aiohttp
import msgspec
from cpu_serving.traffic import Request, run

from chaos_run.traffic import Known, Outcome, PairAddress, Way, client, through

__all__ = ["Spec", "crowd"]


class Spec(msgspec.Struct, frozen=True):
    """known: token ids of prompts and of their answers. way: what outcomes call it."""

    way: str
    pair: PairAddress
    known: list[tuple[tuple[int, ...], tuple[int, ...]]]
    clients: int
    lasts_s: float
    seed: int


async def crowd(session: aiohttp.ClientSession, spec: Spec) -> list[Outcome]:
    """For as long as it shall last, and until the last one has left."""
    way = Way(spec.way, frozenset(), through(lambda: spec.pair))
    known = [Known(Request(asked), answer) for asked, answer in spec.known]
    stopping, may_ask, outcomes = asyncio.Event(), asyncio.Event(), list[Outcome]()
    may_ask.set()
    async with asyncio.TaskGroup() as group:
        for n in range(spec.clients):
            rng = random.Random(spec.seed * 1000 + n)
            told = (outcomes.append, stopping, may_ask)
            group.create_task(client(session, way, known, rng, 1.0, spec.lasts_s, *told))
        await asyncio.sleep(spec.lasts_s)
        stopping.set()
    return outcomes


def main() -> None:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)
    outcomes = run(lambda session: crowd(session, spec), 2 * spec.lasts_s)
    sys.stdout.buffer.write(msgspec.json.encode(outcomes))


if __name__ == "__main__":
    main()
