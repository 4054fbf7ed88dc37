# SPDX-License-Identifier: Apache-2.0
"""How much of what a pair handed over left before the forward that computed it was over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cpu_serving import stats
from cpu_serving.expectations import Serving

__all__ = ["Early", "bytes_early"]


@dataclass
class Early:
    """Known once the context is left.

    bytes: that were written before `send()`, of `total`.
    fallbacks: how often something went as a whole instead, by the reason.
    """

    bytes: int = 0
    total: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def assert_share(self, least: float) -> None:
        assert self.total > 0
        assert self.bytes > least * self.total, (
            f"{self.bytes:,} of {self.total:,} bytes left before send(); as a whole went: "
            f"{dict(self.fallbacks)}"
        )


@contextmanager
def bytes_early(serving: Serving) -> Iterator[Early]:
    """Of the requests that are answered inside."""
    early, before = Early(), _sums(serving)
    yield early
    after = _sums(serving)
    early.bytes, early.total = after.bytes - before.bytes, after.total - before.total
    early.fallbacks = after.fallbacks - before.fallbacks


def _sums(serving: Serving) -> Early:
    ranks: Sequence[stats.RankStats] = stats.collect(serving.pair.prefill, time.time())
    return Early(
        sum(rank.bytes_early for rank in ranks),
        sum(rank.bytes for rank in ranks),
        sum((Counter(rank.fallbacks) for rank in ranks), Counter()),
    )
