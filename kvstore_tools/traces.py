# SPDX-License-Identifier: Apache-2.0
"""Recorded requests, and a cache that they are replayed against. Pure, but for reading the file.

Traces are those of the FAST'25 paper on Mooncake (JSON lines with ``timestamp`` in ms,
``input_length``, ``output_length`` and ``hash_ids``: a number for each block of 512 tokens, which
stands for the block and all before it).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore.memory.policies import POLICIES

__all__ = ["BLOCK_TOKENS", "BlockCache", "Request", "read_trace"]

BLOCK_TOKENS: Final = 512

Count = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True):
    """A line of a trace."""

    #: Of its arrival, in ms since the trace's begin.
    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: list[Count]


def read_trace(path: Path) -> list[Request]:
    """``ValueError`` names the line that is none; ``OSError``."""
    decoder = msgspec.json.Decoder(Request)
    requests: list[Request] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                requests.append(decoder.decode(line))
            except msgspec.DecodeError as exc:
                raise ValueError(f"{path}, line {number}: {exc}") from exc
    if not requests:
        raise ValueError(f"{path} has no requests")
    return requests


class BlockCache:
    """Blocks by their numbers, up to a capacity; the policy says which go for others."""

    def __init__(self, policy: str, capacity: int) -> None:
        """``policy``: a name of ``policies.POLICIES``; ``capacity``: in blocks."""
        self._policy = POLICIES[policy]()
        self._capacity = capacity
        self._stored: set[int] = set()

    def __len__(self) -> int:
        return len(self._stored)

    def run(self, blocks: Sequence[int]) -> int:
        """How many blocks from the first on are cached."""
        for number, block in enumerate(blocks):
            if block not in self._stored:
                return number
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> None:
        """Blocks that are cached were used; the others are cached from now on."""
        for block in blocks:
            key = block.to_bytes(8, "little")
            if block in self._stored:
                self._policy.touch(key)
                continue
            if len(self._stored) >= self._capacity:
                victim = self._policy.evict()
                if victim is not None:
                    self._stored.discard(int.from_bytes(victim, "little"))
            self._policy.add(key)
            self._stored.add(block)
