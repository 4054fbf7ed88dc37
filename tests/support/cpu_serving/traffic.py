# SPDX-License-Identifier: Apache-2.0
"""Seeded requests of token ids, sent with bounded concurrency; failures are kept as sentences."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp
import numpy as np

from cpu_serving.architectures import FIRST_PLAIN_TOKEN, NEW_TOKENS, VOCAB_SIZE
from cpu_serving.progress import no_tick

__all__ = [
    "Answer",
    "Request",
    "compare",
    "gather_answers",
    "make_requests",
    "make_shared_requests",
    "run",
    "send",
    "send_all",
]

T = TypeVar("T")

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Request:
    """A greedy request: what it asks depends only on its token ids."""

    input_ids: tuple[int, ...]
    new_tokens: int = NEW_TOKENS
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self.new_tokens, "ignore_eos": True}
        return {"input_ids": list(self.input_ids), "sampling_params": sampling, **self.fields}


@dataclass(frozen=True)
class Answer:
    output_ids: tuple[int, ...]
    error: str | None
    elapsed_s: float
    cached_tokens: int = 0
    #: Of a server that drafts: how often it verified, and how many drafts were right.
    verified: int = 0
    right_drafts: int = 0


def make_requests(
    count: int, max_prompt_tokens: int, *, seed: int = 0, new_tokens: int = NEW_TOKENS
) -> list[Request]:
    """`count` random prompts whose lengths run evenly from 1 to the maximum, in random order."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(1, max_prompt_tokens, count).round().astype(int)
    rng.shuffle(lengths)
    return [
        Request(tuple(rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, n).tolist()), new_tokens)
        for n in lengths
    ]


def make_shared_requests(
    count: int, max_prompt_tokens: int, *, seed: int = 0, new_tokens: int = NEW_TOKENS
) -> list[Request]:
    """The same, but three of four prompts begin with the first half of the fourth: they hit the
    prefix cache, some while that prefix is still being computed."""
    requests = make_requests(count, max_prompt_tokens, seed=seed, new_tokens=new_tokens)
    shared = []
    for begin in range(0, count, 4):
        group = requests[begin : begin + 4]
        prefix = max(group, key=lambda request: len(request.input_ids)).input_ids
        prefix = prefix[: len(prefix) // 2]
        shared += [
            replace(request, input_ids=(prefix + request.input_ids)[:max_prompt_tokens])
            for request in group
        ]
    return shared


async def send(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    """One request; an HTTP error, a refused connection or a late answer becomes `Answer.error`."""
    started = time.monotonic()
    try:
        async with session.post(f"{url}/generate", json=request.body()) as response:
            text = await response.text()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        detail = f"{type(error).__name__}: {error}"
        return Answer((), detail, time.monotonic() - started)
    return _answer(status, _json_of(text), time.monotonic() - started)


def _json_of(text: str) -> Any:
    """A router that fails answers with a word or two instead."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _answer(status: int, payload: Any, elapsed_s: float) -> Answer:
    if status != 200 or not isinstance(payload, dict) or "output_ids" not in payload:
        return Answer((), f"HTTP {status}: {payload}", elapsed_s)
    meta = payload.get("meta_info", {})
    finish = meta.get("finish_reason") or {}
    error = finish.get("message", "aborted") if finish.get("type") == "abort" else None
    return Answer(
        tuple(payload["output_ids"]),
        error,
        elapsed_s,
        cached_tokens=int(meta.get("cached_tokens") or 0),
        verified=int(meta.get("spec_verify_ct") or 0),
        right_drafts=int(meta.get("spec_num_correct_drafts") or 0),
    )


def send_all(
    url: str,
    requests: Sequence[Request],
    concurrency: int,
    *,
    timeout_s: float = REQUEST_TIMEOUT_S,
    tick: Callable[[str], None] = no_tick,
) -> list[Answer]:
    """Send all, `concurrency` at a time, and return the answers in the order of the requests."""
    return run(lambda session: gather_answers(session, url, requests, concurrency, tick), timeout_s)


def run(
    job: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, T]],
    timeout_s: float = REQUEST_TIMEOUT_S,
) -> T:
    """Run `job` with a client session in which no request lasts longer than `timeout_s`."""

    async def with_session() -> T:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        # Who sends limits itself. No connection is used twice: a server closes one that was idle
        # for some seconds, and on a busy machine just as the next request comes.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await job(session)

    return asyncio.run(with_session())


async def gather_answers(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[Request],
    concurrency: int,
    tick: Callable[[str], None] = no_tick,
) -> list[Answer]:
    """What `send_all` does, for callers that do other things meanwhile."""
    gate = asyncio.Semaphore(concurrency)
    answered = 0

    async def one(request: Request) -> Answer:
        nonlocal answered
        async with gate:
            answer = await send(session, url, request)
        answered += 1
        tick(f"{answered}/{len(requests)}")
        return answer

    return list(await asyncio.gather(*(one(request) for request in requests)))


def compare(expected: Sequence[Answer], got: Sequence[Answer]) -> list[int]:
    """Indices of the requests whose tokens differ or that failed on either side."""
    return [
        i
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
        if a.error or b.error or a.output_ids != b.output_ids
    ]
