# SPDX-License-Identifier: Apache-2.0
"""Servers and processes that share one store, and what they say of it. For import in tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from cpu_serving.servers import Server, ServerOptions
from cpu_serving.store import flush, with_store
from cpu_serving.traffic import Answer, Request, compare, make_requests, send_all

from kvstore.client.status import QUESTION, StoreStatus, status_of
from te import status

PAGE = 16
WAIT_S = 120.0
PATIENCE_S = 30.0
REQUESTS = make_requests(4, 400, seed=17)


@dataclass
class Place:
    """Where a store's sockets are, and those by which its processes say how they are."""

    path: Path

    @property
    def directory(self) -> Path:
        return self.path / "s"

    def options(self, model: Path, memory: str = "64MiB", **more: Any) -> ServerOptions:
        # Of models that are so small a crowded machine computes as fast as it loads.
        more.setdefault("admission", False)
        # Nor does it run each process at all times.
        more.setdefault("request_timeout_s", PATIENCE_S)
        more.setdefault("load_timeout_s", PATIENCE_S)
        env = {"SGLANG_MOONCAKE_STATUS_DIR": str(self.path / "te")}
        options = with_store(ServerOptions(model), self.directory, memory, **more)
        return replace(options, extra_env=env)

    def statuses(self) -> list[StoreStatus]:
        """Of all processes that have a part of the store."""
        found = []
        for live in status.running(self.path / "te"):
            try:
                found.append(status_of(status.ask(live.path, QUESTION)))
            except status.StatusSocketError:
                continue  # Another engine, or a process that ends.
        return found


def ask(server: Server, requests: Sequence[Request] = REQUESTS) -> list[Answer]:
    answers = send_all(server.url, requests, concurrency=4)
    errors = [one.error for one in answers if one.error]
    assert not errors, errors[0]
    return answers


def hits(answers: Sequence[Answer]) -> list[int]:
    return [one.cached_tokens for one in answers]


def all_pages(requests: Sequence[Request] = REQUESTS) -> list[int]:
    """The tokens that a server can take from a cache: it computes the last one in any case."""
    return [(len(one.input_ids) - 1) // PAGE * PAGE for one in requests]


def stored_pages(request: Request) -> int:
    """Of prompt and answer; SGLang does not keep the last token that it makes."""
    return (len(request.input_ids) + request.new_tokens - 1) // PAGE


def puts(place: Place) -> int:
    """How many pages of all servers were stored, or could not be."""
    return sum(sum(one.puts.values()) for one in place.statuses())


def hit_all(server: Server, expected: Sequence[Answer]) -> None:
    """Pages become known in the background: asks again until all are."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        answers = ask(server)
        assert not compare(expected, answers)
        if hits(answers) == all_pages():
            return
        assert time.monotonic() < deadline_s, f"hits of {hits(answers)} tokens, not {all_pages()}"
        flush(server)


def until(condition: Any, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.05)


class Lender:
    """`kvstore serve`."""

    def __init__(self, place: Place, *where: str) -> None:
        command = [sys.executable, "-m", "kvstore", "serve", "--memory=32MiB"]
        self.process = subprocess.Popen(
            [*command, *(where or [f"--directory={place.directory}"])],
            stdout=subprocess.PIPE,
            process_group=0,
            env=os.environ | {"XDG_RUNTIME_DIR": str(place.path)},
        )
        assert self.process.stdout is not None
        assert b"lends" in self.process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def kill(self) -> None:
        """kill -9; idempotent."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def knows(place: Place, lenders: Sequence[Lender]) -> bool:
    return any(
        len([seen for seen in one.owners if seen.usable]) == len(lenders)
        for one in place.statuses()
    )


def knows_all(place: Place, but: Collection[int] = ()) -> bool:
    """Whether each process, but these, has heard of all objects of the others."""
    statuses = place.statuses()
    objects = {one.pid: one.own.objects for one in statuses if one.own is not None}
    fresh = [one for one in statuses if one.pid not in but]
    return bool(fresh) and all(
        sum(seen.objects for seen in one.owners)
        >= sum(count for pid, count in objects.items() if pid != one.pid)
        for one in fresh
    )


def held(place: Place) -> int:
    """The objects of all owners that lend memory."""
    return sum(one.own.objects for one in place.statuses() if one.own is not None and one.memory)
