# SPDX-License-Identifier: Apache-2.0
"""The port of a session: answers questions for the card of this process's engine."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import te
from bootstrap_server.admission.crowd import Crowd, source_of
from bootstrap_server.admission.refusals import Refusals
from sglang_mooncake.faces.mooncake_engine.exchange import (
    QUESTION_HEAD_BYTES,
    NoCard,
    Told,
    answer,
    place_of,
    proofs_nbytes,
    refusal,
)

__all__ = ["Answerer"]

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S: Final = 5.0
"""A connection that takes longer, from its beginning to its end, is closed."""
CONNECTIONS_MAX: Final = 256
CONNECTIONS_OF_SOURCE_MAX: Final = 128
"""Beyond these, the oldest of the source that has most goes for a new one (`Crowd`)."""
BACKLOG: Final = 1024
START_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 5.0


class Answerer:
    """Listens in a thread of its own until `close`."""

    def __init__(
        self,
        host: str,
        ports: tuple[int, int] | None,
        keys: Sequence[bytes],
        tell: Callable[[], Told],
    ) -> None:
        """
        Args:
            ports: the first and the last of those of which a free one is taken (default: of all).
            keys: of the deployment's secrets; without, everybody is answered.
            tell: called for each question; `te.ClosedError` if there is nothing to tell any more.

        Raises:
            OSError: the address cannot be listened on, or no port is free.
            TimeoutError: the thread does not start.
        """
        self._keys, self._tell = keys, tell
        self._socket = _listen(host, ports)
        self.port: Final[int] = self._socket.getsockname()[1]
        self._crowd: Crowd[asyncio.StreamWriter] = Crowd(CONNECTIONS_MAX, CONNECTIONS_OF_SOURCE_MAX)
        self._refusals = Refusals("question for this engine's card")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="mooncake-face", daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except BaseException:
            self._socket.close()
            raise

    def close(self) -> None:
        """Ends connections and thread. Idempotent."""
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as exc:
            if self._started.done():
                raise
            self._started.set_exception(exc)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._meet, sock=self._socket, backlog=BACKLOG)
        self._started.set_result(None)
        await self._ended.wait()
        server.close()
        while (one := self._crowd.first_to_go()) is not None:
            self._crowd.leave(one)
            one.transport.abort()
        await asyncio.sleep(0)  # The handlers see it, and end.

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: one question, one answer."""
        address = str(writer.get_extra_info("peername", ("?",))[0])
        self._crowd.enter(writer, source_of(address))
        surplus = self._crowd.surplus()
        if surplus is not None:
            self._crowd.leave(surplus)
            surplus.transport.abort()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                whom = place_of(writer.get_extra_info("sockname") or ("?", 0))
                writer.write(await self._answer(reader, address, whom))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as exc:
            self._refusals.note(address, f"it asked for nothing: {exc!r}")
        finally:
            self._crowd.leave(writer)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, address: str, whom: bytes) -> bytes:
        try:
            head = await reader.readexactly(QUESTION_HEAD_BYTES)
            proofs = await reader.readexactly(proofs_nbytes(head))
            return answer(head, proofs, self._keys, self._tell(), whom)
        except (NoCard, te.ClosedError) as exc:
            self._refusals.note(address, str(exc))
            return refusal(str(exc))


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Sockets that Python makes take over a port in TIME_WAIT, and none that another one has."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError:
            if port == last:
                raise
    raise AssertionError("a range of ports has at least one")
