# SPDX-License-Identifier: Apache-2.0
"""Which pages of which request are loaded and stored: the scheduler's part of the store connector.
Pure: what is stored is asked of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.objects.changes import Keys, keys_of_digests

__all__ = ["Requests", "Work", "held_by_all"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Work:
    """Pages of one request that the workers load or store.

    blocks: their numbers in the KV cache.
    keys: of the same pages in the store, shape (pages, 16).
    """

    request_id: str
    blocks: list[int]
    keys: Keys


def held_by_all(
    keys: Keys, ranks: Sequence[tuple[bytes, int]], exists: Callable[[Keys, bytes, int], Bools]
) -> Bools:
    """Which pages every rank can load; none before the ranks are known.

    ranks: of each, the signature and the bytes of its pages.
    exists: which pages are stored under these.
    """
    found = np.full(len(keys), bool(ranks))
    for signature, page_bytes in ranks:
        found &= exists(keys, signature, page_bytes)
    return found


class Requests:
    """What the scheduler knows of its requests. A page is a block of vLLM's."""

    def __init__(self, block_tokens: int, stored: Callable[[Keys], Bools]) -> None:
        """``stored``: which pages are in the store, for all ranks; it must not wait."""
        self._block_tokens = block_tokens
        self._stored = stored
        #: Of requests that have pages to load: the first of them.
        self._matched: dict[str, int] = {}
        #: Requests that have been given pages. Each is once: had a page not come, the same one
        #: would be found again, and without an end.
        self._given: set[str] = set()
        #: How many of its pages are stored, or on their way.
        self._saved: dict[str, int] = {}
        #: Requests whose blocks the workers read, or have read.
        self._saving: set[str] = set()

    def match(self, request_id: str, hashes: Sequence[bytes], computed_tokens: int) -> int:
        """How many tokens behind ``computed_tokens`` can be loaded: those of whole pages.

        ``hashes``: of each full block of the request, in which all tokens before it are hashed.
        """
        self._matched.pop(request_id, None)
        first = computed_tokens // self._block_tokens
        if request_id in self._given or first >= len(hashes):
            return 0
        found = self._stored(keys_of_digests(hashes[first:]))
        pages = len(found) if found.all() else int(found.argmin())
        if pages:
            self._matched[request_id] = first
        return pages * self._block_tokens

    def given(
        self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int], tokens: int
    ) -> Work | None:
        """The request has blocks for this many of the tokens that ``match`` has found: what is to
        be loaded into them. ``blocks``: all of the request's. A page of which vLLM takes a part is
        loaded whole, since vLLM computes none of the tokens that it takes."""
        first = self._matched.pop(request_id, None)
        if not tokens or first is None:
            return None
        end = first + -(-tokens // self._block_tokens)
        if end > min(len(blocks), len(hashes)):
            raise ValueError(
                f"request {request_id}: pages {first} to {end} are to be loaded, and it has"
                f" {len(blocks)} blocks and {len(hashes)} hashes"
            )
        self._given.add(request_id)
        return Work(request_id, list(blocks[first:end]), keys_of_digests(hashes[first:end]))

    def computed(
        self, request_id: str, hashes: Sequence[bytes], blocks: Sequence[int], tokens: int
    ) -> Work | None:
        """A step computes the request up to this many tokens: what is to be stored behind it.

        A page is stored once all of its tokens are computed and known: with asynchronous
        scheduling vLLM knows a token some steps after it has scheduled its computation.
        """
        first = self._saved.get(request_id, 0)
        end = min(tokens // self._block_tokens, len(hashes), len(blocks))
        if end <= first:
            return None
        self._saved[request_id] = end
        keys = keys_of_digests(hashes[first:end])
        missing = ~self._stored(keys)
        if not missing.any():
            return None
        self._saving.add(request_id)
        return Work(request_id, np.asarray(blocks[first:end])[missing].tolist(), keys[missing])

    def finished(self, request_id: str) -> bool:
        """Forgets the request. Whether workers may still read its blocks: they say when not."""
        self._matched.pop(request_id, None)
        self._given.discard(request_id)
        self._saved.pop(request_id, None)
        is_saving = request_id in self._saving
        self._saving.discard(request_id)
        return is_saving
