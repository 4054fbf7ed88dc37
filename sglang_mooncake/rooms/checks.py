# SPDX-License-Identifier: Apache-2.0
"""Why requests of decode ranks, or chunks of the scheduler, cannot be those of a room."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sglang_mooncake.messages import RoomRequest
from sglang_mooncake.rooms.prefill_events import Chunk
from sglang_mooncake.rooms.states import RoomState

__all__ = ["chunk_problem", "disagreement", "layers_problem"]


def disagreement(requests: Collection[RoomRequest]) -> str | None:
    """Decode ranks that ask for one room must be the ranks of one request."""
    room = next(iter(requests)).room
    counts = {request.destinations for request in requests}
    if len(counts) > 1 or len(requests) > max(counts):
        return (
            f"{len(requests)} decode ranks asked for room {room} and disagree "
            f"how many of them there are: {sorted(counts)}"
        )
    cached = {request.decode_prefix_len for request in requests}
    if len(cached) > 1:
        return (
            f"the decode ranks that asked for room {room} hold different numbers of "
            f"its tokens: {sorted(cached)}"
        )
    return None


def chunk_problem(
    state: RoomState, next_page: int, requests: Iterable[RoomRequest], chunk: Chunk
) -> str | None:
    """A chunk must continue where the last one ended, and end where the destination's pages do."""
    if state is RoomState.OPEN:
        return "the scheduler sent pages before a decode rank had asked for them"
    if chunk.first != next_page or state is RoomState.ALL_SENT:
        return (
            f"the prefill server sends pages {chunk.first}..{chunk.span.stop} after pages "
            f"0..{next_page}{' and the last chunk' * (state is RoomState.ALL_SENT)}: "
            "a chunk was lost or overtaken on its way"
        )
    after = chunk.span.stop
    for request in requests:
        if request.target is None:
            continue
        wanted, span = request.target.num_pages, request.target.page_span
        filled = -(-after // span)
        if filled > wanted or (chunk.is_last and filled != wanted):
            return (
                f"the prefill server sends pages {chunk.first}..{after} "
                f"({'last' if chunk.is_last else 'not the last'} chunk), but a decode rank "
                f"made room for {wanted * span} pages: do both servers see the same prompt, "
                "and the same --page-size?"
            )
    return None


def layers_problem(requests: Iterable[RoomRequest], chunk: Chunk) -> str | None:
    """Why no layer of a chunk can be written before the chunk is sent. Nothing is wrong then: the
    chunk itself decides."""
    for request in requests:
        target = request.target
        if target is None:
            continue
        if target.page_span > 1:
            return "decode ranks deal out the tokens of a page"
        if chunk.span.stop > target.num_pages:
            return "more pages are filled than the decode side made room for"
    return None
