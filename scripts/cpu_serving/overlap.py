# SPDX-License-Identifier: Apache-2.0
"""Overlap scheduling on CPU servers: the settings of the stand-in for a GPU's streams
(`shim/cpu_overlap.py`), and what it has counted."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Overlap", "OverlapCounts", "read_counts"]

VARIABLE = "CPU_SERVING_STREAMS"


@dataclass(frozen=True)
class Overlap:
    """How late events are, and whether the hand-over waits for them.

    delay_ms: longest time of one piece of work on a stream: the KV of one layer, an event.
    ignore_waits: the negative control, in which only SGLang itself waits for events.
    """

    delay_ms: float = 4.0
    seed: int = 0
    ignore_waits: bool = False

    def environment(self, role: str, counts: Path) -> dict[str, str]:
        """Of a server with this role; `counts` is a directory for `read_counts`."""
        settings = {
            "delay_ms": self.delay_ms,
            "seed": self.seed,
            # Writes from outside land in the pool of a decode server: it has one copy alone.
            "published": role == "prefill",
            "ignore_waits": self.ignore_waits,
            "counts": str(counts),
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
    garbled_slots: slots that held garbage until a stream got there, summed over buffers.
    """

    events: int
    waits: int
    early_prefixes: int
    garbled_slots: int

    @property
    def taken(self) -> bool:
        """Whether the way was taken that is the matter here: sends before their events."""
        return self.waits > 0 and self.early_prefixes > 0 and self.garbled_slots > 0


def read_counts(folder: Path) -> OverlapCounts:
    """The sums over all processes that wrote to the directory."""
    files = [struct.unpack("<4Q", path.read_bytes()) for path in folder.glob("*.counts")]
    return OverlapCounts(*(sum(column) for column in zip((0, 0, 0, 0), *files, strict=True)))
