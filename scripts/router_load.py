# SPDX-License-Identifier: Apache-2.0
"""What a router costs: processor time of its process for a streamed request, and how much later the
first token comes than from the decode server itself. SGLang's mini-lb beside it in the same run.

The servers behind the routers compute nothing: each sends its events at once. Prints one JSON
object. Rounds alternate; each figure is the median of its rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median

from command_line import Parser, count, some_of

if __name__ == "__main__":  # before the packages that only .venv has are imported
    PARSER = Parser(".venv/bin/python scripts/router_load.py", __doc__)
    add = PARSER.add_argument
    add("--requests", type=count, default=1000, metavar="N", help="of each round (1000)")
    add("--rounds", type=count, default=5, metavar="N", help="(5)")
    add("--at-once", type=count, default=16, metavar="N", help="requests under way (16)")
    add("--prompt", type=count, default=1000, metavar="N", help="tokens of a prompt (1000)")
    add("--events", type=count, default=8, metavar="N", help="of each stream (8)")
    add(
        "--tokenizer-path",
        metavar="DIR",
        help="of a model: prompts are text, of which our router makes about --prompt tokens",
    )
    add("--ways", type=some_of(("ours", "mini-lb")), default="ours,mini-lb", help="(both)")
    PARSER.add_argument(
        "--servers", type=count, metavar="PORT", help="be the servers, as the script starts itself"
    )
    OPTIONS = PARSER.parse_args()

import aiohttp
import psutil
import uvloop
from aiohttp import web
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
#: Lets SGLang's modules be imported where there is no GPU.
SHIM = ROOT / "tests/support/cpu_serving/shim"
READY_S = 300.0


def free_port() -> int:
    """That the next one is free, too, for the prefill server."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port = int(one.getsockname()[1])
            with suppress(OSError, OverflowError):  # Another's, or above the last one.
                other.bind(("127.0.0.1", port + 1))
                return port


# --- the servers ---


def _events(prompt: int, number: int) -> list[bytes]:
    """As SGLang's: the tokens so far, and what it says of the request."""
    meta = {"prompt_tokens": prompt, "cached_tokens": 0, "finish_reason": None, "id": "0" * 32}
    made = []
    for end in range(1, number + 1):
        value = {"text": "abc " * end, "output_ids": list(range(end)), "meta_info": meta}
        made.append(b"data: " + json.dumps(value).encode() + b"\n\n")
    return [*made, b"data: [DONE]\n\n"]


async def _serve_servers(decode_port: int, prompt: int, number: int) -> None:
    """The decode server, and the prefill server at the next port, until the process is ended."""

    def answering(
        events: Sequence[bytes],
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                await response.write(event)
                await asyncio.sleep(0)
            return response

        return answer

    async def well(_: web.Request) -> web.Response:
        return web.json_response({})

    for port, events in (
        (decode_port, _events(prompt, number)),
        (decode_port + 1, _events(prompt, 1)),
    ):
        app = web.Application(client_max_size=64 << 20)
        app.add_routes([web.post("/generate", answering(events))])
        app.add_routes([web.get(path, well) for path in ("/health", "/server_info")])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()


# --- the client ---


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes) -> float:
    """Seconds until the first bytes of the answer."""
    begun_s = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{url}/generate", data=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{url}: status {response.status}: {await response.text()}")
        first = await response.content.readany()
        first_s = time.perf_counter() - begun_s
        rest = await response.content.read()
    if not (first + rest).endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"an answer of {url} is not whole")
    return first_s


async def _round(url: str, bodies: Sequence[bytes], at_once: int) -> list[float]:
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(body: bytes) -> float:
            async with gate:
                return await _ask(session, url, body)

        return list(await asyncio.gather(*map(one, bodies)))


def _bodies(number: int, prompt: int, rng: random.Random, reader: Tokenizer | None) -> list[bytes]:
    """``reader``: prompts are text; what its random tokens say in words has about as many."""
    made = []
    first, end = (1000, 100_000) if reader is None else (0, reader.get_vocab_size())
    for _ in range(number):
        tokens = [rng.randrange(first, end) for _ in range(prompt)]
        asked = {"input_ids": tokens} if reader is None else {"text": reader.decode(tokens)}
        made.append(json.dumps({**asked, "stream": True}).encode())
    return made


# --- the run ---


@contextmanager
def _process(*words: str, path: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{path}:{ROOT}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def _until_it_answers(url: str) -> None:
    deadline_s = time.monotonic() + READY_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{url} does not answer")
            await asyncio.sleep(0.1)


def _processor_s(pid: int) -> float:
    leader = psutil.Process(pid)
    times = [one.cpu_times() for one in (leader, *leader.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    rng, port = random.Random(1), free_port()
    decode, prefill = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"
    figures = ["--prompt", str(OPTIONS.prompt), "--events", str(OPTIONS.events)]
    directory, reader = OPTIONS.tokenizer_path, None
    if directory is not None:
        reader = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    with ExitStack() as started:
        started.enter_context(_process(__file__, "--servers", str(port), *figures))
        asyncio.run(_until_it_answers(decode))
        urls, pids = {}, {}
        for way in OPTIONS.ways:
            at = free_port()
            module = ["-m", "sglang_mooncake.sglang.cli", "router"]
            if directory is not None:
                module += ["--tokenizer-path", directory]
            if way == "mini-lb":
                module = ["-m", "sglang_router.launch_router", "--mini-lb"]
            where = ["--pd-disaggregation", "--host", "127.0.0.1", "--port", str(at)]
            where += ["--prefill", prefill, "8998", "--decode", decode]
            router = _process(*module, *where, path=SHIM)
            pids[way] = started.enter_context(router).pid
            urls[way] = f"http://127.0.0.1:{at}"
            asyncio.run(_until_it_answers(urls[way]))
        costs: dict[str, list[float]] = {way: [] for way in OPTIONS.ways}
        firsts: dict[str, list[float]] = {way: [] for way in ("none", *OPTIONS.ways)}
        for number in range(OPTIONS.rounds + 1):  # The first one is for warming up.
            for way in OPTIONS.ways:
                bodies = _bodies(OPTIONS.requests, OPTIONS.prompt, rng, reader)
                before_s = _processor_s(pids[way])
                uvloop.run(_round(urls[way], bodies, OPTIONS.at_once))
                cost_s = (_processor_s(pids[way]) - before_s) / len(bodies)
                alone = _bodies(100, OPTIONS.prompt, rng, reader)
                first_s = median(uvloop.run(_round(urls[way], alone, 1)))
                if number:
                    costs[way].append(cost_s)
                    firsts[way].append(first_s)
            direct_s = median(uvloop.run(_round(decode, alone, 1)))
            if number:
                firsts["none"].append(direct_s)
    direct_ms = median(firsts["none"]) * 1e3
    found = {
        way: {
            "processor_ms_per_request": round(median(costs[way]) * 1e3, 3),
            "added_to_first_token_ms": round(median(firsts[way]) * 1e3 - direct_ms, 3),
        }
        for way in OPTIONS.ways
    }
    about = {"first_token_of_server_ms": round(direct_ms, 3), "load_1min": os.getloadavg()[0]}
    print(json.dumps({**found, **about}))


if __name__ == "__main__":
    if OPTIONS.servers:
        uvloop.run(_serve_servers(OPTIONS.servers, OPTIONS.prompt, OPTIONS.events))
    else:
        main()
