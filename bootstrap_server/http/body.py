# SPDX-License-Identifier: Apache-2.0
"""What all routes share: reading a body, refusing with a sentence, answering."""

from __future__ import annotations

import asyncio
import gzip
import hmac
from typing import Final, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from bootstrap_server.admission.proof import digest_of
from bootstrap_server.decoding import BadText, decoded, excerpt
from bootstrap_server.ranks.errors import NotReady

__all__ = [
    "BODY_BYTES_MAX",
    "RefusalError",
    "Snapshot",
    "check_body",
    "error_response",
    "hear_body",
    "json_response",
    "read_body",
    "sentences",
]

BODY_BYTES_MAX: Final = 1 << 20
#: A body of at most 1 MiB needs far less; a slow client must not hold a connection for ever.
BODY_DEADLINE_S: Final = 10.0
#: The descriptions of ranks differ in few bytes: this makes about a fifteenth of them.
GZIP_LEVEL: Final = 1

_T = TypeVar("_T")


class RefusalError(Exception):
    """A request that gets a 4xx: status, sentence, and further fields of a JSON answer."""

    def __init__(self, status: int, sentence: str, **details: object) -> None:
        super().__init__(sentence)
        self.status = status
        self.details = details


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[_T]) -> _T:
    """The request's body, decoded; `RefusalError` when it is too large, too slow or not one."""
    data = await hear_body(request)
    try:
        return decoded(decoder, data)
    except BadText as error:
        raise RefusalError(400, f"{_what(request)}: bad body: {error}") from error


async def check_body(request: web.Request, digest: bytes) -> None:
    """`RefusalError` unless the request's body is the one of that digest."""
    if not hmac.compare_digest(digest_of(await hear_body(request)), digest):
        raise RefusalError(400, f"{_what(request)}: the body is not the one that was proved")


async def hear_body(request: web.Request) -> bytes:
    """The body, `RefusalError` when it is compressed, too large or too slow; asking again
    costs nothing."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        sentence = (
            f"{_what(request)}: a body is taken as it is, without Content-Encoding "
            f"({excerpt(encoding)!r} was given)"
        )
        raise RefusalError(415, sentence)
    too_large = RefusalError(
        413, f"{_what(request)}: the body is larger than {BODY_BYTES_MAX} bytes"
    )
    # Asked before reading, so that a client that says so is not listened to at all.
    if request.content_length is not None and request.content_length > BODY_BYTES_MAX:
        raise too_large
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await request.read()
    except TimeoutError as error:
        sentence = f"{_what(request)}: the body did not arrive within {BODY_DEADLINE_S:g} s"
        raise RefusalError(408, sentence) from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error


def _what(request: web.Request) -> str:
    return f"{request.method} {request.path}"


def json_response(value: object, status: int = 200) -> web.Response:
    """`value`, encoded by msgspec."""
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def error_response(request: web.Request, refusal: RefusalError) -> web.Response:
    """A refusal as the routes have it: ours as JSON, SGLang's as plain text."""
    if request.path.startswith("/v"):
        return json_response({"error": str(refusal), **refusal.details}, refusal.status)
    return web.Response(text=str(refusal), status=refusal.status)


def sentences(known_paths: str) -> Middleware:
    """A middleware that turns everything that is refused into a status and one sentence."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RefusalError as refusal:
            return error_response(request, refusal)
        except NotReady as error:
            fields = ("registered", "expected", "missing", "note", "instance")
            details = {name: getattr(error, name) for name in fields}
            return error_response(request, RefusalError(503, str(error), **details))
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            sentence = f"{request.method} is not allowed on {request.path}, only {allowed}"
            response = error_response(request, RefusalError(405, sentence))
            response.headers["Allow"] = allowed
            return response
        except web.HTTPNotFound:
            sentence = f"{request.path} does not exist; this bootstrap server answers {known_paths}"
            return error_response(request, RefusalError(404, sentence))

    return answer


class Snapshot:
    """An answer that many ask for at once: encoded once, and sent as the same bytes to all."""

    def __init__(self, value: object) -> None:
        self._plain = msgspec.json.encode(value)
        self._gzipped = gzip.compress(self._plain, GZIP_LEVEL)

    def response(self, request: web.Request) -> web.Response:
        """The answer, compressed for clients that say they take that."""
        takes_gzip = "gzip" in request.headers.get("Accept-Encoding", "")
        response = web.Response(
            body=self._gzipped if takes_gzip else self._plain, content_type="application/json"
        )
        if takes_gzip:
            response.headers["Content-Encoding"] = "gzip"
        return response
