# SPDX-License-Identifier: Apache-2.0
"""One attempt to have a request answered by a pair: both servers get it, the client gets what the
decode server answers, as it comes.

Until the first bytes of the answer have come the client has been told nothing, so an attempt that
fails before can be made again with another pair (`Failed`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple

import msgspec
from aiohttp import web

from sglang_mooncake.router.failing import Failed, check, late, refused, talking_to, words_of
from sglang_mooncake.router.headers import NOT_OURS_TO_TELL
from sglang_mooncake.router.passing import whole_lines, with_prefilled
from sglang_mooncake.router.servers import Server
from sglang_mooncake.router.sglang_http import (
    DONE_EVENT,
    Body,
    Told,
    error_event,
    event_json,
    events_in,
    for_pair,
    is_one,
    is_single,
    told_in,
    wants_input_logprobs,
    wants_stream,
)
from sglang_mooncake.router.upstream import Answer, Broken, Unreachable, Upstream

__all__ = ["Ask", "Course", "Forwarder", "Pair"]

#: When the prefill server says that it has failed, the decode server soon says why.
DECODE_SAYS_S: Final = 1.0
#: The prefill server's answer ends with the hand-over; it may be read a little later.
PREFILL_ENDS_S: Final = 5.0
ABORT_S: Final = 2.0
#: What part of a stream's time its client may be waited for, if the stream is to say how far apart
#: the server's tokens come.
CLIENT_PART_MAX: Final = 0.1
#: A first event is smaller than this, or passed on without a look.
FIRST_EVENT_BYTES_MAX: Final = 1 << 20
#: Aborts and ends of prefill answers that are under way in the background.
BACKGROUND_MAX: Final = 4096


class Pair(NamedTuple):
    """Who answers a request."""

    prefill: Server
    decode: Server


class Ask(NamedTuple):
    """A client's request, as it is sent to servers."""

    path: str
    body: Body
    headers: Mapping[str, str]
    #: Whether it goes over connections that nothing was asked on before, which no server is about
    #: to close.
    on_new: bool = False


class Course(msgspec.Struct):
    """What has come of an attempt."""

    #: Is called once: when the prefill server's answer has come, so that the prompt is computed and
    #: handed over, or with None when there will be no such answer.
    on_prefill: Callable[[Told | None], None]
    #: Seconds from the begin until the first bytes of the decode server's answer had come.
    first_s: float | None = None
    #: Of a stream: times between its events, and how long they were in all.
    gaps: int = 0
    gaps_s: float = 0.0
    #: Why the answer has ended in the middle. The client has been told, as far as it can be.
    stopped: str | None = None
    #: Whether it was the decode server that stopped.
    is_broken: bool = False


class Forwarder:
    """Makes attempts."""

    def __init__(
        self,
        timeout_s: float,
        answer_bytes_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An attempt lasts ``timeout_s`` at most, with its answer. Of a prefill server's answer,
        which is kept as a whole, there may be ``answer_bytes_max``."""
        self.upstream: Final = Upstream()
        self.timeout_s = timeout_s
        self.answer_bytes_max, self.clock = answer_bytes_max, clock
        self._background: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends what is under way in the background, and connections."""
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.upstream.close()

    async def attempt(
        self, ask: Ask, pair: Pair, room: int, request: web.Request, course: Course
    ) -> web.StreamResponse:
        """The answer, which the client has been sent, and what has come of it in ``course``. Raises
        ``Failed``."""
        try:
            attempt = _Attempt(self, ask, pair, room, request, course)
        except BaseException:
            course.on_prefill(None)
            raise
        return await attempt.run()

    def later(self, job: Coroutine[Any, Any, None]) -> bool:
        """Does it in the background; False if too much is under way there already."""
        if len(self._background) >= BACKGROUND_MAX:
            job.close()
            return False
        task = asyncio.create_task(job)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return True

    async def abort(self, server: Server, rid: str, headers: Mapping[str, str]) -> None:
        """Tells a server to end a request; whether it does is not waited for long."""
        sent = {name: text for name, text in headers.items() if name.lower() != "content-type"}
        sent["Content-Type"] = "application/json"
        raw = msgspec.json.encode({"rid": rid})
        # A server that does not take it notices that the connection is closed, some seconds later.
        with suppress(Unreachable, Broken, UnicodeError, TimeoutError):
            async with asyncio.timeout(ABORT_S):
                answer = await self.upstream.post(server.url, "/abort_request", sent, raw)
            answer.close()


class _Attempt:
    def __init__(
        self,
        forwarder: Forwarder,
        ask: Ask,
        pair: Pair,
        room: int,
        request: web.Request,
        course: Course,
    ) -> None:
        self._forwarder = forwarder
        self._ask, self._pair, self._request = ask, pair, request
        self._course = course
        self._begun_s = forwarder.clock()
        #: The request's name at both servers, if it is ours to give.
        self._rid = os.urandom(16).hex() if is_single(ask.body) else None
        body = ask.body
        if self._rid is not None:
            body = {**body, "rid": msgspec.Raw(f'"{self._rid}"'.encode())}
        self._raw = for_pair(body, pair.prefill.bootstrap_host, pair.prefill.bootstrap_port, room)
        self._merges = wants_input_logprobs(ask.body, ask.path)
        self._streams = wants_stream(ask.body)
        self._until_s = asyncio.get_running_loop().time() + forwarder.timeout_s
        self._limit = asyncio.timeout_at(self._until_s)
        self._decode: Literal["not asked", "asked", "begun", "failed", "left"] = "not asked"
        self._begun: _Begun | None = None
        #: What the client is being told, the last part of it, and whether the client has to read.
        self._answer: web.StreamResponse | None = None
        self._last, self._waits_for_client = b"", False

    async def run(self) -> web.StreamResponse:
        prefill = asyncio.create_task(self._ask_prefill())
        prefill.add_done_callback(self._prefill_is_over)
        is_done = False
        try:
            try:
                async with self._limit:
                    begun = await self._decode_begins(prefill)
                    answer = await self._pass_on(begun, prefill)
            except TimeoutError:
                answer = await self._out_of_time(prefill)
            is_done = True
            return answer
        finally:
            self._end(prefill, is_done)

    async def _decode_begins(self, prefill: asyncio.Task[_Prefilled]) -> _Begun:
        """The decode server's answer, once its first bytes are there."""
        self._decode = "asked"
        try:
            self._begun = await self._ask_decode()
        except Failed as failed:
            self._decode = "failed"
            # A server that has gone away explains more than what the other says of it.
            other = _failure_of(prefill)
            gone = other if isinstance(other, Failed) and other.kind != "answered" else None
            if gone is not None and failed.kind == "answered":
                raise gone from failed
            raise
        except BaseException:
            self._decode = "left"
            raise
        self._decode = "begun"
        if self._limit.when() != self._until_s:
            self._limit.reschedule(self._until_s)  # It answers although the other has failed.
        return self._begun

    def _prefill_is_over(self, task: asyncio.Task[_Prefilled]) -> None:
        error = _failure_of(task)
        is_good = not task.cancelled() and error is None
        self._course.on_prefill(task.result().told if is_good else None)
        if error is not None and self._decode == "asked" and not self._limit.expired():
            # There will be no answer. But the decode server may know why.
            says = isinstance(error, Failed) and error.kind == "answered"
            now = asyncio.get_running_loop().time()
            self._limit.reschedule(min(self._until_s, now + (DECODE_SAYS_S if says else 0.0)))

    async def _out_of_time(self, prefill: asyncio.Task[_Prefilled]) -> web.StreamResponse:
        """The attempt has taken as long as it may, or the prefill server has failed."""
        if self._answer is not None:
            return await self._too_long(self._answer)
        error = _failure_of(prefill)
        if error is not None:
            raise error
        raise late(self._pair.decode if prefill.done() else self._pair.prefill)

    async def _ask_prefill(self) -> _Prefilled:
        """All of the prefill server's answer. ``Failed`` if it is an error."""
        server = self._pair.prefill
        raw = bytearray()
        with talking_to(server):
            response = await self._post(server)
            try:
                if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                    raise await refused(server, response)
                while chunk := await response.read():
                    if len(raw) + len(chunk) <= self._forwarder.answer_bytes_max:
                        raw += chunk
                    elif self._merges:
                        status = HTTPStatus.NOT_IMPLEMENTED
                        raise Failed(server, "answered", "its answer is too long", status)
            finally:
                response.release()
        answer = bytes(raw)
        told = event_json(next(events_in(raw), b"")) if self._streams else answer
        if told is not None:
            check(server, told)
        return _Prefilled(answer, Told() if told is None else told_in(told))

    async def _ask_decode(self) -> _Begun:
        """The decode server's answer, with the first bytes of its body."""
        server = self._pair.decode
        with talking_to(server):
            response = await self._post(server)
            try:
                if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                    raise await refused(server, response)
                first = await self._first_bytes(response)
                if not first:
                    raise Failed(server, "broken", "its answer is empty")
            except BaseException:
                response.close()
                raise
        return _Begun(response, first)

    async def _first_bytes(self, response: Answer) -> bytes:
        """Of a stream its first event, with what came with it. ``Failed`` if the event says so."""
        raw = bytearray()
        while chunk := await response.read():
            raw += chunk
            if not self._streams:
                break
            if b"\n\n" in raw or len(raw) > FIRST_EVENT_BYTES_MAX:
                break
        first = bytes(raw)
        told = event_json(next(events_in(raw), b"")) if self._streams else None
        if told is not None:
            check(self._pair.decode, told)
        return first

    async def _pass_on(
        self, begun: _Begun, prefill: asyncio.Task[_Prefilled]
    ) -> web.StreamResponse:
        first_s = self._forwarder.clock()
        self._course.first_s = first_s - self._begun_s
        prefilled = b""
        if self._merges:
            await asyncio.wait({prefill})  # Whose end is not the attempt's.
            prefilled = prefill.result().answer
        upstream = begun.response
        answer = web.StreamResponse(status=upstream.status)
        for name, value in upstream.headers:
            if name.lower() not in NOT_OURS_TO_TELL:
                answer.headers.add(name, value)
        if upstream.content_length is not None and not self._merges:
            answer.content_length = upstream.content_length
        self._answer = answer
        await answer.prepare(self._request)
        parts = _chunks(begun)
        if self._merges:
            parts = with_prefilled(parts, prefilled, streams=self._streams)
        elif self._streams:
            parts = whole_lines(parts)
        events, client_s = 0, 0.0
        try:
            async for part in parts:
                self._waits_for_client, since_s = True, self._forwarder.clock()
                await answer.write(part)
                self._waits_for_client, self._last = False, part
                client_s += self._forwarder.clock() - since_s
                events += part.count(b"\n\n")
        except Broken as error:
            self._course.is_broken = True
            why = f"{self._pair.decode} stopped in the middle of its answer: {words_of(error)}"
            event = error_event(HTTPStatus.BAD_GATEWAY, why) if self._streams else None
            await self._stop(answer, why, event)
        self._measure(events, self._forwarder.clock() - first_s, client_s)
        return answer

    def _measure(self, events: int, took_s: float, client_s: float) -> None:
        """How far apart the events came of a stream that took so long, and for which the client was
        waited for so long in sum. One that reads slowly says nothing of the server."""
        if self._streams and is_one(self._ask.body) and client_s < CLIENT_PART_MAX * took_s:
            self._course.gaps = max(0, events - 2)  # The end comes with the last token.
            self._course.gaps_s = took_s

    async def _too_long(self, answer: web.StreamResponse) -> web.StreamResponse:
        self._abort_at(self._pair.decode)
        why = "the answer took longer than a request may take (--request-timeout-secs)"
        is_told = self._streams and not self._waits_for_client
        event = error_event(HTTPStatus.GATEWAY_TIMEOUT, why) if is_told else None
        await self._stop(answer, why, event)
        return answer

    async def _stop(self, answer: web.StreamResponse, why: str, event: bytes | None) -> None:
        """The answer ends in the middle. The client gets the event, or sees an answer without its
        end, as it is."""
        self._course.stopped = why
        if event is not None:
            ends = len(self._last) - len(self._last.rstrip(b"\n"))
            between = b"\n" * max(0, 2 - ends)
            self._waits_for_client = True
            await answer.write(between + event + DONE_EVENT)
        elif self._request.transport is not None:
            self._request.transport.abort()

    async def _post(self, server: Server) -> Answer:
        ask = self._ask
        return await self._forwarder.upstream.post(
            server.url, ask.path, ask.headers, self._raw, is_new=ask.on_new
        )

    def _end(self, prefill: asyncio.Task[_Prefilled], is_done: bool) -> None:
        """Leaves nothing behind that still asks."""
        if is_done:
            if self._begun is not None:
                self._begun.response.release()
            if not prefill.done() and self._forwarder.later(_ended_soon(prefill)):
                return
        else:
            self._abort(prefill)
        prefill.cancel()  # Its exception was looked at as it ended.

    def _abort(self, prefill: asyncio.Task[_Prefilled]) -> None:
        """Ends the request where it may still be under way."""
        if self._begun is not None:
            self._begun.response.close()
        if not prefill.done():
            self._abort_at(self._pair.prefill)
        if self._decode != "failed":
            self._abort_at(self._pair.decode)

    def _abort_at(self, server: Server) -> None:
        if self._rid is not None:
            self._forwarder.later(self._forwarder.abort(server, self._rid, self._ask.headers))


class _Prefilled(NamedTuple):
    answer: bytes
    told: Told


class _Begun(NamedTuple):
    response: Answer
    #: Of the body.
    first: bytes


async def _chunks(begun: _Begun) -> AsyncIterator[bytes]:
    if begun.first:
        yield begun.first
    while chunk := await begun.response.read():
        yield chunk


async def _ended_soon(task: asyncio.Task[_Prefilled]) -> None:
    try:
        await asyncio.wait({task}, timeout=PREFILL_ENDS_S)
    finally:
        task.cancel()


def _failure_of(task: asyncio.Task[Any]) -> BaseException | None:
    """What it has ended with; None of one that has not ended, or was cancelled."""
    return task.exception() if task.done() and not task.cancelled() else None
