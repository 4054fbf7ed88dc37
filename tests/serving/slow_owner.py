# SPDX-License-Identifier: Apache-2.0
"""A program: a server whose pages are all at an owner behind a network that becomes slow, and fast
again. Prints what it saw, as JSON: one record for each time that all requests were sent.

It moves into network namespaces of its own, so that it cannot be a part of the tests' process.
Exit status 2: there are no namespaces here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from cpu_serving.model import FIRST_PLAIN_TOKEN, VOCAB_SIZE, LlamaSize, make_llama
from cpu_serving.namespaces import NoNetwork
from cpu_serving.servers import Fleet, Server, ServerOptions, wait_ready
from cpu_serving.store import flush, with_store
from cpu_serving.store_status import statuses
from cpu_serving.traffic import Request, send_all
from store_host import store_directory
from store_redis import redis_server
from ttft_bench.network import NEAR, Network

from bootstrap_server.admission.secret_file import write_secret_file
from kvstore.client.status import OwnerSeen, StoreStatus

EXIT_NO_NAMESPACES = 2
REQUESTS, PROMPT = 16, 512
PAGE = 16
SIZE = LlamaSize(
    layers=4, hidden=256, intermediate=1024, heads=4, head_dim=64, positions=PROMPT + 16
)
SLOW_BITS_PER_S = 20e6
"""A prompt of 4 MiB takes 1.7 s."""
WAIT_S = 240.0
LOAD_TIMEOUT_S = 60.0
"""Slow loads are to come, also on a busy machine: only those show that it does not pay."""
MEMORY = "56MiB"
"""Of the server's host: 7/8 of what the prompts have. They are asked for by turns, so that each is
evicted there before it is asked for again, and comes over the network. A tenth of it, which an
owner keeps free, has room for all pages of a prompt, which a quick server stores at once."""


@contextmanager
def lender(index: str, secret: Path, directory: Path) -> Iterator[None]:
    """`kvstore serve`, in the namespace of the calling thread, with a directory of its own."""
    command = [sys.executable, "-m", "kvstore", "serve", "--memory=128MiB", f"--index={index}"]
    process = subprocess.Popen(
        [*command, f"--secret-file={secret}", f"--directory={directory / 's'}"],
        stdout=subprocess.PIPE,
        process_group=0,
        env=os.environ | {"XDG_RUNTIME_DIR": str(directory)},
    )
    assert process.stdout is not None
    try:
        assert b"lends" in process.stdout.readline()
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Watched:
    """The server, asked for the same prompts again and again."""

    def __init__(self, server: Server, status_dir: Path) -> None:
        self._server = server
        self._status_dir = status_dir
        rows = np.random.default_rng(31).integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, (REQUESTS, PROMPT))
        self._requests = [Request(tuple(row.tolist())) for row in rows]

    def store(self) -> StoreStatus:
        """The server's part of the store."""
        (found,) = (one for one in statuses(self._status_dir) if one.own is None)
        return found

    def others(self) -> tuple[OwnerSeen, ...]:
        """What the owner of the server's host knows of that of the other one."""
        (found,) = (one for one in statuses(self._status_dir) if one.own is not None)
        return found.owners

    def wait_for_owner(self) -> None:
        """Until the server's host can use it."""
        deadline_s = time.monotonic() + WAIT_S
        while not any(one.usable for one in self.others()):
            assert time.monotonic() < deadline_s, "the owner is not known"
            time.sleep(0.05)

    def wait_for_puts(self) -> None:
        """Until all pages of the prompts are at the owner: what waits for that is dropped as the
        device's cache is emptied."""
        deadline_s = time.monotonic() + WAIT_S
        while sum(self.store().puts.values()) < REQUESTS * (PROMPT // PAGE):
            assert time.monotonic() < deadline_s, "the pages are not stored"
            time.sleep(0.05)

    def ask(self, title: str) -> dict[str, Any]:
        """All prompts, one after the other, on an empty device."""
        flush(self._server)
        answers = send_all(self._server.url, self._requests, concurrency=1)
        seen = self.store()
        return {
            "title": title,
            "cached": [one.cached_tokens for one in answers],
            "elapsed_s": [one.elapsed_s for one in answers],
            "output_ids": [one.output_ids for one in answers],
            "errors": [one.error for one in answers if one.error],
            "admission": msgspec.to_builtins(seen.admission),
            "bytes_per_s": [one.bytes_per_s for one in self.others()],
        }


def rounds(network: Network, watched: Watched) -> Iterator[dict[str, Any]]:
    """Computes; loads while the network is fast; then slow; then fast again."""
    yield watched.ask("computed")
    watched.wait_for_puts()
    yield watched.ask("fast")
    network.limit(SLOW_BITS_PER_S)
    yield watched.ask("slow")
    yield watched.ask("still slow")
    network.limit(None)
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        again = watched.ask("fast again")
        yield again
        if min(again["cached"]) > 0 and min(again["cached"]) == max(again["cached"]):
            return


def main() -> int:
    """The exit status."""
    try:
        network = Network()
    except NoNetwork as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NO_NAMESPACES
    with store_directory() as place, redis_server(NEAR) as redis:
        secret, status_dir = place / "secret", place / "te"
        write_secret_file(str(secret))
        options = with_store(
            ServerOptions(make_llama(SIZE), host=NEAR),
            place / "s",
            MEMORY,
            policy="lru",
            copies=2,
            load_timeout_s=LOAD_TIMEOUT_S,
            index=redis.url,
            secret_file=str(secret),
        )
        env = {"SGLANG_MOONCAKE_TRANSPORTS": "tcp", "SGLANG_MOONCAKE_STATUS_DIR": str(status_dir)}
        run_dir = Path(sys.argv[1])
        with ExitStack() as stack, Fleet(run_dir) as fleet:
            with network.far_side():
                (place / "far").mkdir()
                stack.enter_context(lender(redis.url, secret, place / "far"))
            server = fleet.server("single", replace(options, extra_env=env), name="borrower")
            wait_ready([server])
            watched = Watched(server, status_dir)
            watched.wait_for_owner()
            print(json.dumps(list(rounds(network, watched))))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
