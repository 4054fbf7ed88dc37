# SPDX-License-Identifier: Apache-2.0
"""One forward of a prefill batch: which layers it has begun, and what is handed over when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_mooncake.rooms.prefill_events import StreamEvent
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.sglang.layerwise.spans import Span

__all__ = ["Figures", "Forward", "LayerSink", "Part", "Streams"]


class LayerSink(Protocol):
    """What takes layers before their chunk is sent (`PrefillSide`)."""

    @property
    def by_layers(self) -> bool: ...
    @property
    def bytes_per_s(self) -> float: ...
    def send_layers(
        self,
        room: Room,
        pages: npt.NDArray[np.integer],
        first: int,
        below: int,
        events: Sequence[StreamEvent] = (),
        wake: bool = True,
    ) -> None: ...
    def fail(self, room: Room, reason: str) -> None: ...


class Figures(Protocol):
    """What counts (`stats.Recorder`)."""

    def fell_back(self, reason: str) -> None: ...
    def forward_hooked(self, hooks_us: float) -> None: ...


class Streams:
    """The device's streams, as CUDA's torch and ROCm's have them."""

    @staticmethod
    def event(timing: bool = False) -> Any:
        """An event behind all that the current stream has been given."""
        event = torch.cuda.Event(enable_timing=timing)
        event.record(torch.cuda.current_stream())
        return event


@dataclass(frozen=True, slots=True)
class Part:
    """What the forward computes of one request. `pages` as in `PrefillSide.send_layers`."""

    span: Span
    pages: npt.NDArray[np.integer]


class Forward:
    """Told when attention of a layer begins (`begins`), and when all is over (`ends`).

    When attention of a layer begins, all layers before it are written, in the order of the stream.
    It also holds for layers that are written within fused kernels and for graphs that are cut at
    attention: writing comes before attention of the same layer, or right after it.

    Without `borders` it only looks on: `numbers` are the layers in the order in which they ran.

    Args:
        borders: numbers of layers, rising. When attention of one begins, those below it go.
        streams: where the forward runs; None: it is computed on the spot.
        tokens: that it computes.
    """

    def __init__(
        self,
        sink: LayerSink,
        parts: Sequence[Part],
        borders: Sequence[int],
        streams: Streams | None,
        tokens: int,
    ) -> None:
        self.parts, self.tokens = parts, tokens
        self.numbers: list[int] = []
        self.broken = False
        #: Spent here, in all; and on the hand-overs alone, of which there were so many.
        self.hook_s = self.hand_over_s = 0.0
        self.hand_overs = 0
        self._sink, self._streams = sink, streams
        self._borders = list(borders)
        self._watches = not borders
        self._below = 0  # what has been handed over
        self._next = self._borders.pop(0) if self._borders else None
        self._began: Any = self._now()
        self._ended: Any = None

    def begins(self, number: int) -> None:
        """Attention of the layer of this number begins."""
        if self._watches:
            self.numbers.append(number)
        elif self._next is not None and number >= self._next:
            while self._borders and number >= self._borders[0]:
                self._borders.pop(0)
            self._next = self._borders.pop(0) if self._borders else None
            self._send_layers(number)
        elif number < self._below:
            self._fail(number)

    def ends(self, last: int) -> None:
        """The forward is over as far as this thread is concerned; `last` is its last layer."""
        self._ended = self._now()
        if self._below and not self.broken:
            self._send_layers(last + 1)

    def seconds(self) -> float | None:
        """The forward's time, after `ends`; None: the stream has not come to its end."""
        if self._streams is None:
            return float(self._ended - self._began)
        if not self._ended.query():
            return None
        return float(self._began.elapsed_time(self._ended)) / 1000

    def _now(self) -> Any:
        """For `seconds`: this point of the stream, or of time."""
        return self._streams.event(timing=True) if self._streams else time.perf_counter()

    def _send_layers(self, below: int) -> None:
        began_s = time.perf_counter()
        events: tuple[StreamEvent, ...] = ()
        if self._streams is not None:
            events = (self._streams.event(),)
        self._below = below
        for part in self.parts:
            span = part.span
            is_last = part is self.parts[-1]
            self._sink.send_layers(span.sender.room, part.pages, span.first, below, events, is_last)
        took_s = time.perf_counter() - began_s
        self.hand_overs += 1
        self.hand_over_s += took_s
        self.hook_s += took_s

    def _fail(self, number: int) -> None:
        """What was handed over may be written again: nobody knows which bytes went."""
        if self.broken:
            return
        self.broken, self._next = True, None
        for part in self.parts:
            self._sink.fail(
                part.span.sender.room,
                f"layer {number} of the model ran again after layers below {self._below} were "
                "sent: start the server without SGLANG_MOONCAKE_LAYERWISE",
            )
