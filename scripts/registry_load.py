# SPDX-License-Identifier: Apache-2.0
"""How the bootstrap server bears many ranks.

Starts one in a process of its own; every rank has a connection of its own, as it has in a cluster.
Prints one JSON object; times are those of the last answer, in seconds, and include this client.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    PARSER = Parser(".venv/bin/python scripts/registry_load.py", __doc__)
    PARSER.add_argument("--ranks", type=int, default=4096, metavar="N", help="of prefill (4096)")
    PARSER.add_argument("--decode-ranks", type=int, default=1024, metavar="N", help="(1024)")
    PARSER.add_argument("--restarts", type=int, default=1000, metavar="N", help="of ranks (1000)")
    OPTIONS = PARSER.parse_args()

import msgspec
import uvloop

from bootstrap_server import (
    Instance,
    InstanceConfig,
    KVFormat,
    Rank,
    RankRecord,
    Topology,
)
from bootstrap_server.ranks.records import RankLife

ROOT = Path(__file__).resolve().parents[1]
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass
class Connection:
    """HTTP/1.1 with as little work as possible on this side."""

    port: int
    streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None)

    async def ask(self, method: str, path: str, body: bytes = b"", gzipped: bool = False) -> bytes:
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        accept = "Accept-Encoding: gzip\r\n" if gzipped else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{accept}Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(answer)
        data = await reader.readexactly(int(length[1]) if length else 0)
        if b"connection: close" in answer.lower():
            writer.close()
            self.streams = None
        if not answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{method} {path}: {answer[:40]!r} {data[:200]!r}")
        return data


async def timed(calls: Iterable[Awaitable[object]]) -> tuple[float, list[float]]:
    """Seconds until the last call has ended, and those of each."""

    async def one(call: Awaitable[object]) -> float:
        begin_s = time.perf_counter()
        await call
        return time.perf_counter() - begin_s

    begin_s = time.perf_counter()
    each_s = await asyncio.gather(*(one(call) for call in calls))
    return time.perf_counter() - begin_s, each_s


def memory_mb(pid: int) -> dict[str, float]:
    """Resident memory of a process, now and at its highest."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {
        name: round(int(re.search(rf"{name}:\s+(\d+)", text)[1]) / 1024, 1)  # type: ignore[index]
        for name in ("VmRSS", "VmHWM")
    }


async def measure(
    port: int, pid: int, ranks: int, decoders: int, restarts: int
) -> dict[str, object]:
    dp = max(n for n in (1, 2, 4, 8, 16, 32, 64) if ranks % n == 0)
    topology = Topology(dp, 1, ranks // dp, 1)
    config = InstanceConfig(topology, KVFormat(64, "bfloat16"), protocol=1)
    path = "/v1/instances/default"
    members = [Connection(port) for _ in range(ranks)]
    lives = [
        Rank(coords, f"10.0.{number // 250}.{number % 250}", 40_000 + number % 8, 1, 30_000)
        for number, coords in enumerate(topology.coords())
    ]
    bodies = [msgspec.json.encode(RankRecord(config, rank)) for rank in lives]
    report: dict[str, object] = {"ranks": ranks, "decode ranks": decoders}
    report["memory at start, MB"] = memory_mb(pid)

    whole_s, _ = await timed(
        one.ask("PUT", path + "/ranks", body) for one, body in zip(members, bodies, strict=True)
    )
    report["all ranks register, s"] = round(whole_s, 3)
    report["memory then, MB"] = memory_mb(pid)

    answers: list[bytes] = []

    async def resolve(connection: Connection, query: str = "") -> None:
        answers.append(await connection.ask("GET", path + query, gzipped=True))

    askers = [Connection(port) for _ in range(decoders)]
    whole_s, each_s = await timed(resolve(one) for one in askers)
    report["decode ranks resolve at once, s"] = {
        "all": round(whole_s, 3),
        "median": round(statistics.median(each_s), 3),
    }

    # A rank leaves; decode ranks wait for it; it comes back.
    first = msgspec.json.encode(RankLife(lives[0].coords, lives[0].epoch))
    await members[0].ask("DELETE", path + "/leases", first)
    waits = [asyncio.ensure_future(resolve(one, "?wait_s=60")) for one in askers]
    await members[-1].ask("GET", "/health")
    begin_s = time.perf_counter()
    await members[0].ask("PUT", path + "/ranks", bodies[0])
    await asyncio.gather(*waits)
    report["waiting decode ranks are told, s"] = round(time.perf_counter() - begin_s, 3)
    for answer in set(answers):
        if msgspec.json.decode(gzip.decompress(answer), type=Instance).ranks != tuple(lives):
            raise SystemExit("an answer shows other ranks than have registered")
    report["answer, bytes"] = {"gzip": len(answers[-1]), "plain": len(gzip.decompress(answers[-1]))}

    renewals = [msgspec.json.encode(RankLife(rank.coords, rank.epoch)) for rank in lives]
    whole_s, _ = await timed(
        one.ask("PUT", path + "/leases", body) for one, body in zip(members, renewals, strict=True)
    )
    report["every rank renews once, s"] = round(whole_s, 3)

    begin_s = time.perf_counter()
    for epoch in range(2, restarts + 2):
        again = msgspec.structs.replace(lives[0], epoch=epoch)
        await members[0].ask("PUT", path + "/ranks", msgspec.json.encode(RankRecord(config, again)))
    report[f"one rank restarts {restarts} times, s"] = round(time.perf_counter() - begin_s, 3)
    counts = json.loads(await members[0].ask("GET", "/v1/instances"))["default"]
    report["ranks then"] = counts["registered"]
    report["memory at the end, MB"] = memory_mb(pid)
    return report


def main(options: argparse.Namespace) -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # inherited by the server
    needed = options.ranks + 2 * options.decode_ranks + 100
    if hard < needed:
        sys.exit(f"{needed} open files are needed, and {hard} allowed (ulimit -n, now {soft})")
    server = subprocess.Popen(
        [sys.executable, "-m", "bootstrap_server", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[-1])
        report = uvloop.run(
            measure(port, server.pid, options.ranks, options.decode_ranks, options.restarts)
        )
    finally:
        server.terminate()
        server.wait(10)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(OPTIONS))
