# SPDX-License-Identifier: Apache-2.0
"""How an attempt fails, and what a server's answer says of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Final, Literal, TypeAlias, get_args

import aiohttp

from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import error_in
from sglang_mooncake.router.upstream import Answer, Broken, Exhausted, Stale, Unreachable

__all__ = [
    "KINDS",
    "NO_ANSWER",
    "Failed",
    "Kind",
    "check",
    "late",
    "refused",
    "talking_to",
    "without_frames",
    "words_of",
]

#: How a question to a server fails. ``UnicodeError`` is what a look-up raises of a host that can be
#: no name, such as ``a..b`` or one with a label above 63 characters.
NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, UnicodeError)
#: What is kept of an answer that says that the request has failed.
ERROR_BYTES_MAX: Final = 64 << 10
#: These may be another server's to answer better; all others are about the request itself.
_TRY_AGAIN: Final = frozenset({500, 502, 503, 504})
#: How a server has failed: no connection could be made, or not by this router, which has no
#: descriptor left; one that had been idle has ended as it was used again; the connection has ended;
#: the time that a request may take is over; it has answered that it failed.
Kind: TypeAlias = Literal["unreachable", "exhausted", "stale", "broken", "late", "answered"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)


class Failed(Exception):
    """The attempt has ended before the client was told anything.

    ``status`` and ``body`` are what the client gets if no other attempt is made.
    """

    def __init__(
        self,
        server: Server,
        kind: Kind,
        sentence: str,
        status: int = HTTPStatus.BAD_GATEWAY,
        body: bytes | None = None,
    ) -> None:
        super().__init__(f"{server}: {sentence}")
        self.server, self.kind, self.sentence = server, kind, sentence
        self.status, self.body = status, body

    @property
    def may_retry(self) -> bool:
        """Whether another attempt may succeed."""
        if self.kind == "answered":
            return self.status in _TRY_AGAIN
        return self.kind != "late"


def without_frames(failed: Failed) -> Failed:
    """The same without the frames that it came through: they have the request's body, and refer to
    it, so that a search for cycles of garbage alone would let the body go."""
    error: BaseException | None = failed
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    return failed


@contextmanager
def talking_to(server: Server) -> Iterator[None]:
    """What can go wrong on the way becomes ``Failed``."""
    try:
        yield
    except Exhausted as error:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        raise Failed(server, "exhausted", words_of(error), status) from error
    except (Unreachable, UnicodeError) as error:
        raise Failed(server, "unreachable", words_of(error)) from error
    except Broken as error:
        kind: Kind = "stale" if isinstance(error, Stale) else "broken"
        raise Failed(server, kind, words_of(error)) from error


def late(server: Server) -> Failed:
    """It has not answered in time."""
    sentence = "no answer in the time that a request may take (--request-timeout-secs)"
    return Failed(server, "late", sentence, HTTPStatus.GATEWAY_TIMEOUT)


async def refused(server: Server, response: Answer) -> Failed:
    """What a server's answer with the status of an error says. One that sends to another place is
    an error, too: where requests go is not for servers to say."""
    raw = b""
    while len(raw) < ERROR_BYTES_MAX and (part := await response.read()):
        raw += part
    raw = raw[:ERROR_BYTES_MAX]
    if response.status < HTTPStatus.BAD_REQUEST:
        sentence = f"answered with status {response.status}, which is not followed"
        return Failed(server, "answered", sentence)
    failure = error_in(raw)
    sentence = raw.decode(errors="replace")[:1000] if failure is None else failure[1]
    sentence = f"answered with status {response.status}: {sentence}"
    return Failed(server, "answered", sentence, response.status, raw)


def check(server: Server, told: bytes) -> None:
    """Raises ``Failed`` if an answer says so."""
    failure = error_in(told)
    if failure is None:
        return
    status, sentence = failure
    if not HTTPStatus.BAD_REQUEST <= status < 600:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    raise Failed(server, "answered", sentence, status, told)


def words_of(error: BaseException) -> str:
    return str(error) or type(error).__name__
