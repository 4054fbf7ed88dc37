# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode server of vLLM with its connector of NIXL, whoever's NIXL that is, and
clients of both."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from cpu_serving.model import make_model
from cpu_serving.processes import ServingError
from cpu_serving.servers import Fleet, wait_ready
from cpu_serving.traffic import Answer, Request, make_requests
from cpu_serving.vllm_proxy import Proxy
from cpu_serving.vllm_servers import VllmServer, ask, nixl_flags, side_channel, start_vllm

from nixl_beside.contenders import environment
from nixl_beside.rows import Answers

__all__ = ["Clients", "Known", "Pair", "known", "start_alone", "timed"]

MODEL: Final = "llama"
ROLES: Final = ("kv_producer", "kv_consumer")
#: A prompt that a server has in its cache is not handed over.
_FLAGS: Final = ("--no-enable-prefix-caching",)


@dataclass(frozen=True)
class Known:
    """Requests, and what an ordinary server answers to them."""

    requests: Sequence[Request]
    answers: Sequence[Answer]

    def counted(self, got: Sequence[tuple[int, Answer]]) -> Answers:
        """``got``: which request was answered how."""
        failed = sum(answer.error is not None for _, answer in got)
        right = sum(
            answer.error is None and answer.output_ids == self.answers[at].output_ids
            for at, answer in got
        )
        slowest_s = max((answer.elapsed_s for _, answer in got), default=0.0)
        return Answers(len(got), right, len(got) - right - failed, failed, slowest_s)


def start_alone(fleet: Fleet, place: Path) -> VllmServer:
    """An ordinary server of the same model. Raises ServingError."""
    return start_vllm(fleet, "alone", make_model(MODEL), place)


def known(alone: VllmServer, number: int, tokens: int) -> Known:
    """Of so many prompts of up to so many tokens; the ordinary server, which need not be ready,
    is stopped. Raises ServingError."""
    # The shortest has one token, which the decode server computes: nothing is handed over.
    requests = sorted(make_requests(number + 1, tokens, seed=31), key=_tokens)[1:]
    wait_ready([alone])
    answers = ask(alone, requests)
    alone.stop()
    if errors := [one.error for one in answers if one.error]:
        raise ServingError(f"the ordinary server failed: {errors[0]}")
    return Known(requests, answers)


class Pair:
    """Both servers, ready; `again` starts one anew at its ports."""

    def __init__(self, fleet: Fleet, place: Path, contender: str, connector: str) -> None:
        """Raises ServingError, contenders.Absent."""
        self._fleet, self._place, self._name = fleet, place, contender
        self._connector, self._given = connector, environment(contender)
        self._ports = [(fleet.port(), fleet.port()) for _ in ROLES]
        self._starts = count(1)
        self._servers = [self._start(at) for at in range(len(ROLES))]
        wait_ready(self._servers)

    @property
    def prefill(self) -> VllmServer:
        return self._servers[0]

    @property
    def decode(self) -> VllmServer:
        return self._servers[1]

    def proxy(self) -> Proxy:
        return Proxy(self.prefill.url, self.decode.url)

    def again(self, server: VllmServer) -> None:
        """Of one that has ended; returns when it is ready. Raises ServingError."""
        at = self._servers.index(server)
        self._servers[at] = self._start(at)
        wait_ready([self._servers[at]])

    def rest(self) -> None:
        for server in self._servers:
            server.process.freeze()

    def go_on(self) -> None:
        for server in self._servers:
            server.process.thaw()

    def stop(self) -> None:
        for server in self._servers:
            server.stop()

    def _start(self, at: int) -> VllmServer:
        http, side = self._ports[at]
        return start_vllm(
            self._fleet,
            f"{self._name}-{ROLES[at]}-{next(self._starts)}",
            make_model(MODEL),
            self._place,
            [*_FLAGS, *nixl_flags(ROLES[at], connector=self._connector)],
            at,
            more_env={**self._given, **side_channel(side)},
            port=http,
        )


class Clients:
    """Each asks one request after another, until the context is left."""

    def __init__(self, proxy: Proxy, asked: Known, number: int) -> None:
        self._proxy, self._asked = proxy, asked
        self._numbers, self._ended, self._going = count(), threading.Event(), threading.Event()
        self._going.set()
        self._got: list[tuple[int, Answer]] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._going.set()
        for thread in self._threads:
            thread.join()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Nobody begins a request meanwhile."""
        self._going.clear()
        try:
            yield
        finally:
            self._going.set()

    def wait(self, more: int, timeout_s: float) -> None:
        """Until so many more are answered. Raises ServingError."""
        wanted, deadline_s = len(self._got) + more, time.monotonic() + timeout_s
        while len(self._got) < wanted:
            if time.monotonic() > deadline_s:
                raise ServingError(f"clients have not had {more} answers in {timeout_s:.0f} s")
            time.sleep(0.05)

    def answers(self) -> Answers:
        return self._asked.counted(self._got)

    def _run(self) -> None:
        while not self._ended.is_set():
            at = next(self._numbers) % len(self._asked.requests)
            self._got.append((at, timed(self._proxy, self._asked.requests[at])))
            self._going.wait()


def _tokens(request: Request) -> int:
    return len(request.input_ids)


def timed(server: VllmServer | Proxy, request: Request) -> Answer:
    """With the time that it took."""
    began_s = time.monotonic()
    (answer,) = ask(server, [request])
    return replace(answer, elapsed_s=time.monotonic() - began_s)
