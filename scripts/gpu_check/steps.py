# SPDX-License-Identifier: Apache-2.0
"""What is run, in this order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

__all__ = ["DRIVER", "STEPS", "Step", "chosen"]

Kind = Literal["facts", "correctness", "speed"]
TRANSPORTS: Final = ("samehost", "tcp")


@dataclass(frozen=True)
class Step:
    """One function, run in processes of its own."""

    name: str
    kind: Kind
    #: ``module:function``; takes a ``child.Task`` and the arguments.
    function: str
    #: It is ended then. Of a machine with one idle GPU, several times what it takes [estimated].
    deadline_s: float
    arguments: dict[str, Any] = field(default_factory=dict)


def _both(name: str, function: str, deadline_s: float) -> list[Step]:
    return [
        Step(f"{name}-{one}", "correctness", function, deadline_s, {"transport": one})
        for one in TRANSPORTS
    ]


def _pairs(transport: str, memory: str, beside: str) -> Step:
    arguments = {"transport": transport, "memory": memory, "beside": beside}
    return Step(f"pairs-{transport}-{memory}", "speed", "gpu_check.speed:pairs", 300.0, arguments)


#: The first, always.
DRIVER: Final = Step("driver", "facts", "gpu_check.facts:driver", 60.0)
STEPS: Final = (
    DRIVER,
    Step("machine", "facts", "gpu_check.facts:machine", 30.0),
    Step("kinds", "correctness", "gpu_check.facts:kinds", 60.0),
    Step("copier", "correctness", "gpu_check.copying:copier", 90.0),
    Step("digests", "correctness", "gpu_check.copying:digests", 90.0),
    *_both("bytes", "gpu_check.pairs:all_bytes", 120.0),
    *_both("allocations", "gpu_check.pairs:allocations", 120.0),
    *_both("arrivals", "gpu_check.pairs:arrivals", 90.0),
    *_both("cancels", "gpu_check.endings:cancels", 90.0),
    *_both("fences", "gpu_check.endings:fences", 90.0),
    *_both("kills", "gpu_check.endings:kills", 120.0),
    *_both("remaps", "gpu_check.endings:remaps", 150.0),
    *_both("torch-memory", "gpu_check.with_torch:allocations", 180.0),
    *_both("torch-graph", "gpu_check.with_torch:graph", 120.0),
    Step("copies", "speed", "gpu_check.speed:copies", 240.0),
    Step("calls", "speed", "gpu_check.speed:calls", 60.0),
    _pairs("samehost", "cuda", "device-copy"),
    _pairs("tcp", "cuda", "te-host"),
    _pairs("samehost", "cuda-host", ""),
    _pairs("samehost", "host-cuda", ""),
    _pairs("tcp", "cuda-host", ""),
    _pairs("tcp", "host-cuda", ""),
)


def chosen(steps: Sequence[Step], patterns: str) -> list[Step]:
    """Those whose name or kind is like one of the patterns (commas between); `ValueError` for a
    pattern that is like none."""
    wanted = patterns.split(",")
    for pattern in wanted:
        if not any(fnmatchcase(word, pattern) for one in steps for word in (one.name, one.kind)):
            raise ValueError(f"no step is like {pattern!r}; --list shows all")
    return [
        one
        for one in steps
        if any(fnmatchcase(word, pattern) for word in (one.name, one.kind) for pattern in wanted)
    ]
