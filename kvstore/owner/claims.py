# SPDX-License-Identifier: Apache-2.0
"""Claims of slots as an owner and its clients know them, and how much may be claimed ahead."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

import te
from kvstore.objects.changes import Keys
from kvstore.objects.pieces import U64
from kvstore.rules.object_table import Claim, Verdict

__all__ = [
    "AHEAD_BYTES_MAX",
    "CLAIM_IS_OVER",
    "CLAIM_OBJECTS_MAX",
    "FENCE_TIMEOUT_S",
    "NO_CONTENT",
    "AheadClaims",
    "Content",
    "Grant",
    "Held",
    "OpenTag",
]

CLAIM_OBJECTS_MAX: Final = 4096
AHEAD_BYTES_MAX: Final = 8 << 20
"""Of a claim ahead. To ask for larger ones takes little of the time that they are written in."""
AHEAD_PART: Final = 1 / 32
"""This part of the memory is claimed ahead at most."""
CLAIM_IS_OVER: Final = "the claim is over: its deadline has passed, or it was ended before"
FENCE_TIMEOUT_S: Final = 5.0


class Grant(NamedTuple):
    """The answer to a claim."""

    #: To be named when the write has ended; 0 if nothing was granted.
    claim_id: int
    #: For the write.
    tag: int
    #: One for each object that was asked for.
    verdicts: Sequence[Verdict]
    #: Of the granted ones, in order.
    slots: Sequence[int]
    #: Where the write may have a label (``kvstore.objects.labels``); 0: nowhere.
    label: int = 0


class OpenTag(NamedTuple):
    """Of a claim."""

    tag: int
    writer: te.Identity
    #: The room for a label; 0: none.
    label: int
    is_ahead: bool


@dataclass(frozen=True)
class Content:
    """What a client says of the objects that it has written under a claim."""

    #: One for each; empty: the owner computes them.
    checksums: U64
    #: Of a claim ahead; else empty.
    keys: Keys
    signature: bytes


NO_CONTENT: Final = Content(np.zeros(0, np.uint64), np.zeros((0, 16), np.uint8), bytes(16))


@dataclass
class Held:
    """A claim that was ended, and whose slots are kept until nothing can land there any more."""

    claim: Claim
    writer: te.Identity
    #: None: its tag was closed before.
    fence: te.Fence | None
    #: What had arrived by then: writes and their bytes.
    arrived: int
    nbytes: int
    #: When its tag was closed, by the owner's clock, and whether the log has it that this takes
    #: long.
    closed_s: float
    opened: OpenTag
    is_told: bool = False
    #: Whether what has come with a label is stored, though its client has not said that it is to
    #: be: it was told by te that all has landed.
    is_kept: bool = False

    def is_closed(self) -> bool:
        """Whether nothing can land there. Does not wait."""
        return self.fence is None or self.fence.poll()

    @property
    def came_whole(self) -> bool:
        """Behind its end: whether one write has landed. It may have done so after ``arrived`` was
        looked at."""
        return self.fence is not None and self.fence.poll() and self.fence.wait(0.0) == 1

    def wait(self, timeout_s: float = math.inf) -> None:
        """Until it is, or for ``FENCE_TIMEOUT_S`` at most."""
        if self.fence is not None:
            with contextlib.suppress(te.FenceTimeout):
                self.fence.wait(min(timeout_s, FENCE_TIMEOUT_S))


class AheadClaims:
    """Which clients have a claim ahead, and of how many bytes. Whoever calls holds a lock."""

    def __init__(self, memory_bytes: int) -> None:
        """``memory_bytes``: of the owner."""
        self._bytes_max = memory_bytes * AHEAD_PART
        self._nbytes: dict[te.Identity, int] = {}

    def may_have(self, writer: te.Identity, nbytes: int) -> bool:
        """Whether a client may have one of so many bytes: it has none, and the claims ahead of all
        clients stay within their part of the memory."""
        if not 0 < nbytes <= AHEAD_BYTES_MAX or writer in self._nbytes:
            return False
        return sum(self._nbytes.values()) + nbytes <= self._bytes_max

    def begin(self, writer: te.Identity, nbytes: int) -> None:
        """It has one."""
        self._nbytes[writer] = nbytes

    def end(self, writer: te.Identity) -> None:
        """It has none any more."""
        self._nbytes.pop(writer, None)
