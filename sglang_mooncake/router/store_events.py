# SPDX-License-Identifier: Apache-2.0
"""What the store has, as SGLang's KV events: pages of the medium ``EXTERNAL`` that come and go.
Pure: the time is handed in.

The format is that of SGLang 0.5.20 and later (`sglang/srt/disaggregation/kv_events.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from kvstore.objects.changes import Keys
from sglang_mooncake.router.kv_events import EXTERNAL, AllBlocksCleared, BlockRemoved
from sglang_mooncake.router.pages import NAME_BYTES

__all__ = ["PAGES_MAX", "Batch", "StoreEvents"]

PAGES_MAX: Final = 1000
"""Of one batch: about 9 kB."""

Batch: TypeAlias = tuple[int, bytes]
"""Its number, and its events in MessagePack."""
_Names: TypeAlias = npt.NDArray[np.int64]


class _BlockStored(msgspec.Struct, tag="BlockStored"):
    """The store knows pages by their names alone."""

    block_hashes: list[int]
    block_size: int
    parent_block_hash: int | None = None
    token_ids: list[int] = []
    lora_id: int | None = None
    medium: str = EXTERNAL


_Event: TypeAlias = _BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    at_s: float
    events: list[_Event]
    dp_rank: int = 0


class StoreEvents:
    """Numbered batches of events, and the last ones of them, which can be repeated."""

    def __init__(self, page_size: int, batches_max: int) -> None:
        """``page_size``: tokens of a page; ``batches_max``: so many are kept."""
        self._page_size = page_size
        self._names: _Names = np.empty(0, np.int64)
        self.batches_max: Final = batches_max
        self._kept: deque[Batch] = deque(maxlen=batches_max)
        self._next = 0
        #: The number from which on the last listing of all pages was told.
        self._listing = 0

    @property
    def tells_all(self) -> bool:
        """Whether what is kept tells of all pages: the last listing is in it."""
        return self._listing >= self._next - self.batches_max

    def batches(self, keys: Keys, at_s: float) -> list[Batch]:
        """Those that tell what has come and gone since the last call. ``keys``: of all that the
        store has now, shape (n, 16), in any order, and each as often as may be. ``at_s``: the time
        by the clock on the wall.

        All pages are told anew before the last listing is no longer kept, if that takes less than
        half of the batches that are kept.
        """
        names = _names(keys)
        gone = np.setdiff1d(self._names, names, assume_unique=True)
        come = np.setdiff1d(names, self._names, assume_unique=True)
        self._names = names
        events: list[_Event] = [
            *([] if self._next else [AllBlocksCleared()]),
            *(BlockRemoved(some.tolist(), EXTERNAL) for some in _parts(gone)),
            *self._stored(come),
        ]
        whole, next_number = len(_parts(names)), self._next + len(events)
        is_leaving = next_number + whole > self._listing + self.batches_max
        if is_leaving and 2 * whole < self.batches_max:
            events += self._stored(names)
            self._listing = next_number
        new = [
            (number, msgspec.msgpack.encode(_Batch(at_s, [event])))
            for number, event in enumerate(events, self._next)
        ]
        self._next += len(new)
        self._kept.extend(new)
        return new

    def _stored(self, names: _Names) -> list[_BlockStored]:
        return [_BlockStored(some.tolist(), self._page_size) for some in _parts(names)]

    def since(self, number: int) -> list[Batch]:
        """Those from this number on that are kept."""
        return [one for one in self._kept if one[0] >= number]


def _names(keys: Keys) -> _Names:
    """As events name pages (``pages.names_of``), ascending, each once."""
    first = np.ascontiguousarray(keys[:, :NAME_BYTES]).view(">i8").reshape(-1)
    ordered = np.sort(first.astype(np.int64))
    # np.unique hashes, and takes 60 times as long.
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def _parts(names: _Names) -> list[_Names]:
    return [names[at : at + PAGES_MAX] for at in range(0, len(names), PAGES_MAX)]
