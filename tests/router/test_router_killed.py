# SPDX-License-Identifier: Apache-2.0
"""A decode server that is killed, as a process, behind a router that is one."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from router_world import FakeServer, run, until

#: It begins each stream, and ends none. Prints its port, and a line for each request.
SERVER = """
import asyncio

EVENT = b'data: {"output_ids": [100]}\\n\\n'
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n"
HEAD += b"Transfer-Encoding: chunked\\r\\n\\r\\n"
WELL = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\n{}"

async def serve(reader, writer):
    head = await reader.readuntil(b"\\r\\n\\r\\n")
    if not head.startswith(b"POST /generate"):
        writer.write(WELL)
        writer.close()
        return
    length = int(head.lower().split(b"content-length:")[1].split()[0])
    if b'"stream"' in await reader.readexactly(length):
        writer.write(HEAD + b"%x\\r\\n%s\\r\\n" % (len(EVENT), EVENT))
    print("asked", flush=True)
    await asyncio.Event().wait()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def process(*words: str) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE, stderr=PIPE)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def line(started: Process) -> str:
    assert started.stdout is not None
    return (await started.stdout.readline()).decode()


@pytest.mark.slow
def test_requests_of_a_decode_server_that_is_killed_are_tried_again_or_told() -> None:
    async def job() -> None:
        rooms: set[int] = set()
        prefill, decode = FakeServer("prefill", rooms), FakeServer("decode", rooms)
        async with process("-c", SERVER) as killed, aiohttp.ClientSession() as session:
            for one in (prefill, decode):
                await one.start()
            other = f"http://127.0.0.1:{int(await line(killed))}"
            words = ["--prefill", prefill.url, "8998", "--decode", other, "--decode", decode.url]
            command = ("-m", "sglang_mooncake.sglang.cli", "router", "--port", "0")
            async with process(*command, "--policy", "round_robin", *words) as router:
                assert router.stderr is not None
                said = ""
                while (found := re.search(r"listens on \S+ port (\d+)", said)) is None:
                    said += (await router.stderr.readline()).decode()
                    assert router.returncode is None, said
                url = f"http://127.0.0.1:{found[1]}/generate"

                async def ask(**body: object) -> str:
                    async with session.post(url, json={"text": "a", **body}) as response:
                        assert response.status == 200
                        return await response.text()

                untold = asyncio.create_task(ask())
                assert await line(killed) == "asked\n"
                assert json.loads(await ask())["output_ids"] == [100, 101, 102]
                begun = asyncio.create_task(ask(stream=True))
                assert await line(killed) == "asked\n"
                await until(lambda: len(prefill.asked) == 3)
                killed.kill()
                assert json.loads(await untold)["output_ids"] == [100, 101, 102]
                *_, error, done, rest = (await begun).split("\n\n")
                assert f"decode server {other} stopped in the middle" in error
                assert (done, rest) == ("data: [DONE]", "")
                assert json.loads(await ask())["output_ids"] == [100, 101, 102]
        for one in (prefill, decode):
            await one.stop()

    run(job())
