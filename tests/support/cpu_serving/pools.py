# SPDX-License-Identifier: Apache-2.0
"""Whether a server's KV pool is whole again once it is idle.

SGLang's /v1/loads gives, per data-parallel rank, `num_used_tokens`: the pool's capacity less what
its allocator has free and less what its radix cache could evict. On an idle server everything else
is a leak (or, below zero, pages freed twice). Flushing the cache first would hide it: a flush
resets the allocator. The snapshot is only rewritten when a scheduler's loop turns, and an idle one
sleeps, so it is woken by asking for its internal state, and a snapshot older than that does not
count. Ranks of a tensor-parallel group other than the first publish no snapshot; for them SGLang's
own idle check counts, which ends the server on a mismatch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import requests

from cpu_serving.processes import ServingError
from cpu_serving.servers import Server

__all__ = ["PoolState", "leaked_pages", "wait_idle", "waiting_requests"]

IDLE_TIMEOUT_S = 60.0
POLL_S = 0.2
HTTP_TIMEOUT_S = 30.0
LEAK_MARKS = ("memory leak detected", "Mem Leak Detected", "KV double free", "use-after-free")


@dataclass(frozen=True)
class PoolState:
    """One data-parallel rank of an idle server."""

    dp_rank: int
    capacity_tokens: int
    used_tokens: int


def leaked_pages(server: Server, *, timeout_s: float = IDLE_TIMEOUT_S) -> int:
    """Pages of an idle server that are neither free nor evictable, over all its ranks.

    Waits until no request is left in any queue and, as pages of an aborted request may be released
    a little later, until nothing is used; what is still used after `timeout_s` has leaked.
    """
    states = wait_idle(server, timeout_s=timeout_s)
    server.process.check_alive()
    log = server.process.log_text()
    for mark in LEAK_MARKS:
        if mark in log:
            raise ServingError(f"the {server.process.name} says: {mark}\n{server.process.tail()}")
    # Rounded away from zero: a part of a page is lost with the page.
    page = server.options.page_size
    return sum(-(-abs(state.used_tokens) // page) for state in states)


def wait_idle(server: Server, *, timeout_s: float = IDLE_TIMEOUT_S) -> list[PoolState]:
    """The pools once all requests are gone and all tokens are free, or as they are at the deadline.

    Raises ServingError when requests are still queued at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        server.process.check_alive()
        loads = _fresh_loads(server, deadline)
        busy = {
            name: count for load in loads for name, count in _requests_in(load).items() if count
        }
        states = [
            PoolState(load["dp_rank"], load["max_total_num_tokens"], load["num_used_tokens"])
            for load in loads
        ]
        if not busy and all(state.used_tokens == 0 for state in states):
            return states
        if time.monotonic() > deadline:
            if busy:
                raise ServingError(f"the {server.process.name} still has requests: {busy}")
            return states
        time.sleep(POLL_S)


def waiting_requests(server: Server) -> int:
    """How many requests wait, for a prefill server or for room; ServingError."""
    loads = _get(server, "/v1/loads")["loads"]
    return sum(int(load["num_waiting_reqs"]) for load in loads)


def _fresh_loads(server: Server, deadline: float) -> list[dict[str, Any]]:
    asked_at = time.time()
    while True:
        _get(server, "/server_info")  # wakes every scheduler, which then publishes a snapshot
        loads: list[dict[str, Any]] = _get(server, "/v1/loads")["loads"]
        if loads and all(load["timestamp"] >= asked_at for load in loads):
            return loads
        if time.monotonic() > deadline:
            raise ServingError(f"the {server.process.name} publishes no fresh load figures")
        time.sleep(POLL_S)


def _requests_in(load: dict[str, Any]) -> dict[str, int]:
    queues = {
        name: count
        for name, count in (load.get("disaggregation") or {}).items()
        if name.endswith("_reqs")
    }
    return queues | {name: load[name] for name in ("num_running_reqs", "num_waiting_reqs")}


def _get(server: Server, path: str) -> Any:
    try:
        response = requests.get(server.url + path, timeout=HTTP_TIMEOUT_S)
        response.raise_for_status()
        return response.json()
    except requests.RequestException as error:
        server.process.check_alive()
        raise ServingError(f"GET {path} of the {server.process.name} failed: {error}") from error
