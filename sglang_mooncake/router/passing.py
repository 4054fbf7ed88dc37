# SPDX-License-Identifier: Apache-2.0
"""What becomes of the parts of an answer on their way from the decode server to the client. Pure:
the parts are handed in as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from sglang_mooncake.router.sglang_http import (
    event_json,
    events_in,
    index_of,
    with_input_logprobs,
)

__all__ = ["whole_lines", "with_prefilled"]

#: A line of a stream that is longer is passed on before its end is there.
LINE_BYTES_MAX: Final = 1 << 20


async def whole_lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same without half a line at the end of a part: the error that follows where a server dies
    stands in a line of its own."""
    rest = bytearray()
    async for part in parts:
        at = part.rfind(b"\n") + 1
        if at or len(rest) > LINE_BYTES_MAX:
            yield bytes(rest) + part[:at]
            rest = bytearray(part[at:])
        else:
            rest += part
    if rest:
        yield bytes(rest)


async def with_prefilled(
    parts: AsyncIterator[bytes], prefilled: bytes, *, streams: bool
) -> AsyncIterator[bytes]:
    """The answer with the prompt's log-probabilities out of the prefill server's."""
    buffer = bytearray()
    if not streams:
        async for part in parts:
            buffer += part
        yield with_input_logprobs(bytes(buffer), prefilled)
        return
    first_of: dict[int, bytes] = {}
    for event in events_in(bytearray(prefilled)):
        told = event_json(event)
        if told is not None:
            first_of.setdefault(index_of(told), told)
    async for part in parts:
        buffer += part
        for event in events_in(buffer):
            told = event_json(event)
            first = None if told is None else first_of.get(index_of(told))
            if told is None or first is None:
                yield event
            else:
                yield b"data: " + with_input_logprobs(told, first) + b"\n\n"
    if buffer:
        yield bytes(buffer)
