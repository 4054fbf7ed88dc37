# SPDX-License-Identifier: Apache-2.0
"""Loads made of recorded traces, and what an oracle that knows all caches gets of them. Pure.

A trace is too large for servers on a CPU, and its first hundred requests share little, since its
conversations last for an hour. So whole families of requests are taken, at random: all those that
share a block that is not common to many. Blocks of 512 tokens become shorter, and so do the times
between requests.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from cpu_serving.architectures import FIRST_PLAIN_TOKEN, VOCAB_SIZE

from kvstore_tools.traces import BLOCK_TOKENS, Request

__all__ = ["Load", "oracle_hits", "sampled", "scaled"]

#: A block that more than one request in so many has stands for no family (a system's prompt).
COMMON_PART: Final = 50


@dataclass(frozen=True)
class Load:
    """Prompts in the order of their times."""

    prompts: tuple[tuple[int, ...], ...]
    #: Of each, when it is sent, as a part of the whole time: 0.0 the first, 1.0 the last one.
    at: tuple[float, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))


def sampled(requests: Sequence[Request], count: int, seed: int) -> list[Request]:
    """Whole families of requests, ``count`` requests in all (fewer if the trace has no more)."""
    common = Counter(block for one in requests for block in set(one.hash_ids))
    families: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, one in enumerate(requests):
        own = (block for block in one.hash_ids if common[block] * COMMON_PART <= len(requests))
        families[next(own, f"request {number}")].append(number)
    names = sorted(families, key=str)
    random.Random(seed).shuffle(names)
    taken: list[int] = []
    for name in names:
        taken += families[name][: count - len(taken)]
    return [requests[number] for number in sorted(taken)]


def scaled(
    requests: Sequence[Request], block_tokens: int, tokens_max: int, seed: Sequence[int]
) -> Load:
    """``block_tokens`` stand for a block; a longer prompt than ``tokens_max`` is cut. With another
    seed the prompts share as much with each other, and nothing with those of this one."""
    blocks: dict[int, list[int]] = {}

    def tokens_of(block: int) -> list[int]:
        if block not in blocks:
            rng = np.random.default_rng([*seed, block])
            blocks[block] = rng.integers(FIRST_PLAIN_TOKEN, VOCAB_SIZE, block_tokens).tolist()
        return blocks[block]

    prompts = []
    for one in requests:
        length = min(max(one.input_length * block_tokens // BLOCK_TOKENS, 1), tokens_max)
        tokens = [token for block in one.hash_ids for token in tokens_of(block)]
        prompts.append(tuple(tokens[:length]) or (FIRST_PLAIN_TOKEN,))
    begun, ended = requests[0].timestamp, requests[-1].timestamp
    at = tuple((one.timestamp - begun) / max(ended - begun, 1) for one in requests)
    return Load(tuple(prompts), at)


def oracle_hits(prompts: Sequence[Sequence[int]], page_size: int) -> list[int]:
    """Of each prompt, the tokens that some cache can have by then if each computed prompt stays in
    the cache where it was computed: the longest beginning of whole pages in common with any one
    before it. The last token is computed always."""
    known: set[int] = set()
    found = []
    for prompt in prompts:
        name, hits, misses = 0, 0, False
        for end in range(page_size, len(prompt) + 1, page_size):
            name = hash((name, tuple(prompt[end - page_size : end])))
            misses = misses or name not in known
            if not misses and end < len(prompt):
                hits = end
            known.add(name)
        found.append(hits)
    return found
