# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its DevTools protocol over one WebSocket (aiohttp).

https://chromedevtools.github.io/devtools-protocol/. What a page does wrong is collected: errors in
its console, refusals by its policy, exceptions, and requests to anywhere but its own origin.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from rdma_testbed.packages import ensure_programs

__all__ = ["Tab", "browser"]

#: Of a machine that does much else meanwhile.
DEADLINE_S = 90
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
]
#: Notes each task that keeps the page from answering for more than 50 ms.
LONG_TASKS = """
window.longTasks = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longTasks.push(entry.duration);
}).observe({ type: "longtask", buffered: true });
"""


class Tab:
    """One page. `complaints` is what it did wrong."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self._origin = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def open(self, url: str) -> None:
        """Load a page and wait until it is there."""
        self._origin = url
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=LONG_TASKS)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && document.title !== ''")

    async def call(self, method: str, **params: object) -> Any:
        """One command of the protocol, and its result."""
        number = len(self._answers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(answer, DEADLINE_S)

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            value = await self.ask(expression)
            if value:
                return value
            assert time.monotonic() < deadline_s, f"never true: {expression}; {self.complaints}"
            await asyncio.sleep(0.05)

    async def press(self, key: str, text: str = "") -> None:
        """One key, as if it was typed."""
        typed = {"text": text} if text else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def resize(self, width_px: int, height_px: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width_px,
            height=height_px,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers[told["id"]]
                if "error" in told:
                    answer.set_exception(RuntimeError(str(told["error"])))
                else:
                    answer.set_result(told["result"])
            else:
                self._note(told["method"], told["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.complaints.append(f"exception: {params['exceptionDetails']}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console: {params['args']}")
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"log: {params['entry']}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                self.requests.append(url)
                if not url.startswith((self._origin, "data:")):
                    self.complaints.append(f"a request to {url}")


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, with a profile that is empty before and gone after."""
    ensure_programs({"chromium": "chromium"}, "the status page's tests")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            ["chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _port(Path(profile), process)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{port}/json/list") as answer,
            ):
                (target,) = [one for one in await answer.json() if one["type"] == "page"]
                where = target["webSocketDebuggerUrl"]
                async with session.ws_connect(where, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    try:
                        yield tab
                    finally:
                        await tab.close()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_S)


async def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    deadline_s = time.monotonic() + DEADLINE_S
    file = profile / "DevToolsActivePort"
    while not (file.exists() and "\n" in file.read_text()):
        assert process.poll() is None, f"chromium has ended with code {process.returncode}"
        assert time.monotonic() < deadline_s, f"chromium did not start within {DEADLINE_S} s"
        await asyncio.sleep(0.05)
    return int(file.read_text().splitlines()[0])
