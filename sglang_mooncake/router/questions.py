# SPDX-License-Identifier: Apache-2.0
"""A question to one server that is no client's prompt: what it says of itself, what it shall do."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from sglang_mooncake.router.failing import NO_ANSWER, words_of
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.upstream import CONNECT_S

__all__ = ["SERVER_INFO", "Said", "ask", "decoded"]

SERVER_INFO: Final = "/server_info"
#: Some of these wait for the scheduler (GET /health_generate: up to 20 s).
ANSWER_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 16 << 20

_T = TypeVar("_T")


class Said(NamedTuple):
    """What a server has answered; status 0 and why, if it has not."""

    status: int
    raw: bytes
    #: Whether nobody listens at its port: there is no process that could have done anything.
    is_gone: bool = False

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK


async def ask(
    session: aiohttp.ClientSession,
    server: Server,
    path: str,
    headers: Mapping[str, str],
    *,
    method: str = "GET",
    query: Mapping[str, str] | None = None,
    raw: bytes = b"",
    wait_s: float = 0.0,
) -> Said:
    """The whole of its answer, within ``ANSWER_S`` and the time for which it was told to wait. Half
    an answer counts as none."""
    try:
        async with session.request(
            method,
            server.url + path,
            params=query,
            data=raw or None,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=ANSWER_S + wait_s, sock_connect=CONNECT_S),
            allow_redirects=False,
        ) as response:
            answer = await _begin_of(response.content, ANSWER_BYTES_MAX + 1)
    except NO_ANSWER as error:
        return Said(0, f"{server}: {words_of(error)}".encode(), _is_refused(error))
    if len(answer) > ANSWER_BYTES_MAX:
        return Said(0, f"{server}: its answer is longer than {ANSWER_BYTES_MAX} bytes".encode())
    return Said(response.status, answer)


def decoded(said: Said, kind: type[_T]) -> _T | None:
    """The JSON of an answer; None of a failure, and of what is no such JSON."""
    if not said.is_ok:
        return None
    try:
        return msgspec.json.decode(said.raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def _begin_of(content: aiohttp.StreamReader, bytes_max: int) -> bytes:
    """A body, or so many bytes of its beginning. (``read`` gives what has come so far.)"""
    raw = bytearray()
    while len(raw) < bytes_max and (chunk := await content.read(bytes_max - len(raw))):
        raw += chunk
    return bytes(raw)


def _is_refused(error: BaseException) -> bool:
    if not isinstance(error, aiohttp.ClientConnectorError):
        return False
    return error.os_error.errno == errno.ECONNREFUSED
