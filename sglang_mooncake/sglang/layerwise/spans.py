# SPDX-License-Identifier: Apache-2.0
"""Which pages of a request a forward completes, as `_send_kv_chunk` will send them after it
(sglang/srt/disaggregation/prefill.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_mooncake.rooms.room import Room

__all__ = ["LeftOut", "Span", "SpanSender", "gather", "span_of"]


class SpanSender:
    """What is read of our senders here. Those of health checks and warm-ups are SGLang's own.

    aux_slot: where metadata will go; None before `init`.
    next_page: position in the room of the first page that is not sent.
    told_tokens: pages of the tokens below it were told layer by layer; written here alone.
    """

    room: Room
    aux_slot: int | None
    next_page: int
    told_tokens: int


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start … end - 1` of a request, whose pages begin at position `first` of its room."""

    sender: SpanSender
    row: int
    start: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A request of which nothing goes early, and why."""

    reason: str


def span_of(request: Any, page_size: int) -> Span | LeftOut:
    """What of a request (SGLang's `Req`) the forward that is about to run completes.

    Overlap scheduling launches a forward before what an earlier one computed is sent. So a
    sender remembers up to which token its pages have been told.
    """
    sender = request.disagg_kv_sender
    if not isinstance(sender, SpanSender):
        return LeftOut("requests of health checks and warm-ups")
    if request.pending_bootstrap or sender.aux_slot is None:
        return LeftOut("decode side not known yet")
    if request.to_finish is not None or request.finished_reason is not None:
        return LeftOut("aborted requests")
    if sender.told_tokens > request.prefix_len:
        return LeftOut("chunks that are computed again")
    total, sent = len(request.origin_input_ids), int(request.start_send_idx)
    start, end = max(sent, sender.told_tokens), min(int(request.extend_end), total)
    if end < total:
        end -= end % page_size  # a partial page goes with the next chunk
    if sent % page_size or start % page_size:
        return LeftOut("chunks that begin within a page")
    if end <= start:
        return LeftOut("chunks without a whole page")
    first = sender.next_page + (start - sent) // page_size
    return Span(sender, int(request.kv.req_pool_idx), start, end, first)


def gather(scheduler: Any, span: Span, streams: bool) -> npt.NDArray[np.integer]:
    """The page numbers of a span, of shape (pages,).

    With `streams` they are copied into pinned memory by the current stream: what is returned holds
    them once an event that is recorded behind this call has happened. Nothing here waits.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    slots = allocator.translate_kv_indices_for_transfer(
        scheduler.req_to_token_pool.req_to_token[span.row, span.start : span.end]
    )
    pages = slots[:: allocator.page_size] // allocator.page_size
    if not streams:
        found: npt.NDArray[np.integer] = pages.numpy()
        return found
    pinned = torch.empty(pages.shape, dtype=pages.dtype, device="cpu", pin_memory=True)
    pinned.copy_(pages, non_blocking=True)
    filled_later: npt.NDArray[np.integer] = pinned.numpy()
    return filled_later
