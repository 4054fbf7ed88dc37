# SPDX-License-Identifier: Apache-2.0
"""A prefill server is killed while many rooms of a decode server wait for it, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import aiohttp
from chaos_run.traffic import PairAddress
from cpu_serving.model import make_model
from cpu_serving.pools import leaked_pages
from cpu_serving.servers import Pair, ServerOptions
from cpu_serving.traffic import Answer, Request, make_requests, run, send_all
from cpu_serving.waiting import all_wait

from soak_run.bench import WAIT_S, Bench, Tally
from soak_run.results import TOLD_S, Asked, Row, Span, causes, end_of_waiting

__all__ = ["kills"]

KILL_EVERY_S: Final = 15.0
"""Twenty in five minutes."""
ROOMS: Final = 50
PROMPT_TOKENS_MAX: Final = 600
LONG_PROMPT: Final = (7,) * 3_000
"""Fifty of these are more than the decode server has memory for."""


@dataclass(frozen=True)
class Killed:
    """answers: of the requests that waited; None of one that the client has given up. told_s: from
    the signal until the last of them ended."""

    answers: Sequence[Answer | None]
    told_s: float


def kills(bench: Bench, seconds: float) -> Row:
    """One for each `KILL_EVERY_S`. Before every other one most of the rooms that wait have named no
    pages, as there is no memory for them; before the others all have."""
    place, options = bench.place("kills"), ServerOptions(make_model("llama"))
    known = [{"": one} for one in bench.known(options.model)]
    pair = bench.pair(options, options, "kills")
    tally, notes, faults, told_s = Tally(), list[str](), list[str](), 0.0
    begun_s = time.monotonic()
    _serves(bench, pair, known, tally)
    for number in range(1, max(2, round(seconds / KILL_EVERY_S)) + 1):
        waiting = list(_waiting(pair, bench.seed + number, is_long=number % 2 == 0))
        killed = _kill(pair, waiting, bench.deadline_s)
        answers = [one for one in killed.answers if one is not None]
        tally.ends += [end_of_waiting(one) for one in killed.answers]
        told_s = max(told_s, killed.told_s)
        why = "; ".join(causes(answers))
        notes.append(
            f"kill {number}: {len(answers)} of {ROOMS} requests failed within "
            f"{killed.told_s:.2f} s: {why}"
        )
        faults += _left(pair, number)
        pair = replace(pair, prefill=bench.again(pair.prefill))
        _serves(bench, pair, known, tally)
    tally.seconds = time.monotonic() - begun_s
    pair.decode.process.check_alive()
    for one in (pair.router, pair.prefill, pair.decode):
        one.stop()
    return bench.row(
        "kills", place, tally, notes=notes, faults=faults, told_late_s=max(0.0, told_s - TOLD_S)
    )


def _waiting(pair: Pair, seed: int, *, is_long: bool) -> Iterator[Request]:
    """In rooms that the prefill server never hears of."""
    prefill = pair.prefill
    where = PairAddress(prefill.url, pair.decode.url, prefill.options.host, prefill.bootstrap_port)
    for request in make_requests(ROOMS, PROMPT_TOKENS_MAX, seed=seed):
        yield where.in_a_room(replace(request, input_ids=LONG_PROMPT) if is_long else request)


def _kill(pair: Pair, waiting: Sequence[Request], deadline_s: float) -> Killed:
    """Once all of them wait."""

    async def job(session: aiohttp.ClientSession) -> Killed:
        sent = await all_wait(session, pair.decode, waiting, WAIT_S)
        killed_s = time.monotonic()
        kill = asyncio.create_task(asyncio.to_thread(pair.prefill.process.kill))
        done, late = await asyncio.wait(sent, timeout=deadline_s)
        told_s = time.monotonic() - killed_s
        for one in late:
            one.cancel()
        await kill
        return Killed([one.result() if one in done else None for one in sent], told_s)

    return run(job, WAIT_S + 2 * deadline_s)


def _left(pair: Pair, number: int) -> list[str]:
    """On the decode server, which must live."""
    pages = leaked_pages(pair.decode)
    return [f"after kill {number} {pages} pages of the decode server are left"] if pages else []


def _serves(
    bench: Bench, pair: Pair, known: Sequence[dict[str, tuple[int, ...]]], tally: Tally
) -> None:
    """All requests once, by the router."""
    answers = send_all(pair.router.url, bench.requests, concurrency=4)
    now_s = time.monotonic()
    asked = [Asked(n, now_s - one.elapsed_s, now_s, one) for n, one in enumerate(answers)]
    tally.add(asked, known, [Span("", 0.0)])
