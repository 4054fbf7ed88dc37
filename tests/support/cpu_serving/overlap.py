# SPDX-License-Identifier: Apache-2.0
"""Overlap scheduling on CPU servers: the settings of the stand-in for a GPU's streams
(`shim/cpu_overlap.py`), what it has counted, and the negative control."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Overlap", "OverlapCounts", "events_ignored", "read_counts"]

# As in shim/cpu_overlap.py.
VARIABLE = "CPU_SERVING_STREAMS"
CONTROL = "ignore-events"


@dataclass(frozen=True)
class Overlap:
    """How late events are.

    delay_ms: time of a long piece of work on a stream: the KV of one layer, an event. One in eight
        is long. Machines are busy, and a sender that reads too early must be early by far.
    layer_ms: what the KV of each layer takes besides, at most: it comes so much after the layer
        before.
    """

    delay_ms: float = 100.0
    layer_ms: float = 2.0
    seed: int = 0

    def environment(self, role: str, folder: Path) -> dict[str, str]:
        """Of a server with this role; `folder` is for `read_counts` and `events_ignored`."""
        settings = {
            "delay_ms": self.delay_ms,
            "layer_ms": self.layer_ms,
            "seed": self.seed,
            # Writes from outside land in the pool of a decode server: it has one copy alone.
            "published": role == "prefill",
            "folder": str(folder),
        }
        return {
            VARIABLE: json.dumps(settings),
            # As with CUDA: the stream of the scheduler waits for the forward in flight.
            "SGLANG_ENABLE_WAR_BARRIER": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1",
        }


@dataclass(frozen=True)
class OverlapCounts:
    """What the stand-in of all ranks of a server saw.

    events: recorded.
    waits: for events that had not happened, by other threads than the scheduler's.
    early_prefixes: chunks that were sent before the forward that follows them.
    pinned_copies: of page numbers, into memory that is filled later.
    garbled_slots: slots that held garbage until a stream got there, summed over buffers.
    """

    events: int
    waits: int
    early_prefixes: int
    pinned_copies: int
    garbled_slots: int

    @property
    def taken(self) -> bool:
        """Whether the way was taken that is the matter here: sends before their events."""
        return self.waits > 0 and self.early_prefixes > 0 and self.garbled_slots > 0


def read_counts(folder: Path) -> OverlapCounts:
    """The sums over all processes that wrote to the directory."""
    files = [struct.unpack("<5Q", path.read_bytes()) for path in folder.glob("*.counts")]
    return OverlapCounts(*(sum(column) for column in zip([0] * 5, *files, strict=True)))


@contextmanager
def events_ignored(folder: Path) -> Iterator[None]:
    """The negative control: meanwhile nobody but SGLang's scheduler waits for events."""
    file = folder / CONTROL
    file.touch()
    try:
        yield
    finally:
        file.unlink()
