# SPDX-License-Identifier: Apache-2.0
"""Which of the pages that the store has a rank loads, and what came of it: the shell of
`kvstore.client.admission` for the linker and for HiCache."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvstore.client.admission import Admitted, is_probe
from kvstore.objects.changes import Keys
from kvstore.store import Store
from sglang_mooncake.sglang.store.forwards import Forwards

__all__ = ["Admission"]

logger = logging.getLogger(__name__)

TOLD_EVERY_S: Final = 60.0
COUNTED_MAX: Final = 1024
"""Requests of which is remembered that they were counted: SGLang looks a request up again each time
that it looks at its queue."""


class Admission:
    """One rank's. All ranks of a server judge for themselves, each by its own measurements. SGLang
    then loads what all of them offer, so that the slowest one decides.

    ``offered`` is for one thread, ``loading`` for another one.
    """

    def __init__(self, store: Store, forwards: Forwards | None, page_tokens: int) -> None:
        """Without ``forwards`` everything that is found is offered."""
        self._store = store
        self._forwards = forwards
        self._page_tokens = page_tokens
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._told_s = -TOLD_EVERY_S

    def close(self) -> None:
        """SGLang's forwards are not looked at any more. Idempotent."""
        if self._forwards is not None:
            self._forwards.close()

    def offered(self, keys: Keys, signature: bytes, page_bytes: int, rid: str | None = None) -> int:
        """How many pages, from the first one on, are stored and worth loading. ``rid``: the
        request, which is counted once; None: each call is one."""
        compute_s = self._page_compute_s()
        if compute_s is None:
            return self._store.admit(keys, signature, page_bytes, None).found
        now_s = time.time()
        probe = bool(len(keys)) and is_probe(keys[0].tobytes(), now_s)
        admitted = self._store.admit(keys, signature, page_bytes, compute_s, probe=probe)
        if admitted.found and (rid is None or self._is_new(rid)):
            self._store.load_times.count(admitted)
            if admitted.declined:
                self._tell(admitted)
        return admitted.offered

    @contextmanager
    def loading(self, keys: Keys, signature: bytes, page_bytes: int) -> Iterator[None]:
        """Around a load of pages: compares what was expected of it with what it takes."""
        compute_s = self._page_compute_s()
        if compute_s is None:
            yield
            return
        expected_s = self._store.expected_s(keys, signature, page_bytes)
        began_s = time.monotonic()
        try:
            yield
        finally:
            if expected_s is not None:
                took_s = time.monotonic() - began_s
                self._store.load_times.loaded(expected_s, took_s, len(keys) * compute_s)

    def _page_compute_s(self) -> float | None:
        each_s = None if self._forwards is None else self._forwards.seconds_per_token()
        return None if each_s is None else each_s * self._page_tokens

    def _is_new(self, rid: str) -> bool:
        if rid in self._counted:
            return False
        self._counted[rid] = None
        if len(self._counted) > COUNTED_MAX:
            self._counted.popitem(last=False)
        return True

    def _tell(self, admitted: Admitted) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < TOLD_EVERY_S:
            return
        self._told_s = now_s
        logger.info(
            "%d of %d pages that the store has are computed: loading all is expected to take %.0f"
            " ms, and computing them %.0f ms; since the start %d pages were computed for that"
            " reason, and %d loaded",
            admitted.declined,
            admitted.found,
            admitted.load_s * 1e3,
            admitted.compute_s * 1e3,
            self._store.load_times.counts.declined,
            self._store.load_times.counts.admitted,
        )
