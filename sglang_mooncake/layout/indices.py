# SPDX-License-Identifier: Apache-2.0
"""Lists of indices, paired by position: item source[i] goes to item target[i]."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_mooncake.layout.description import Dealt

__all__ = [
    "Indices",
    "as_indices",
    "check_indices",
    "check_slot",
    "in_rows",
    "in_runs",
    "joined",
    "owned",
    "ring_slots",
    "rows_of",
]

Indices: TypeAlias = npt.NDArray[np.int64]


def as_indices(what: str, indices: npt.ArrayLike) -> Indices:
    """A list of indices as SGLang has it (list, numpy or CPU tensor, int32 or int64), shape (n,).

    Raises:
        ValueError: not one-dimensional, or no integers.
    """
    array = np.asarray(indices)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{what} indices must be integers, not {array.dtype}")
    # SGLang's only Mamba index comes as a list of an array of one number.
    return array.reshape(-1).astype(np.int64)


def check_indices(what: str, indices: Indices, items: int) -> None:
    """Raise ValueError unless every index names one of `items` items."""
    if len(indices) and (int(indices.min()) < 0 or int(indices.max()) >= items):
        raise ValueError(
            f"{what} outside 0..{items - 1}: {int(indices.min())}..{int(indices.max())}"
        )


def check_slot(what: str, slot: int, items: int) -> None:
    """Raise ValueError unless it is one of `items` slots."""
    if not 0 <= slot < items:
        raise ValueError(f"{what} outside 0..{items - 1}: {slot}")


def owned(pages: npt.NDArray[np.integer], dealt: Dealt) -> npt.NDArray[np.bool_]:
    """Which of these page numbers are dealt to this part."""
    return np.asarray(pages % dealt.of == dealt.index)


def in_rows(pages: Indices, size: int) -> Indices:
    """The rows of these pages, of `size` rows each."""
    return (pages[:, None] * size + np.arange(size)).reshape(-1)


def rows_of(pages: Indices, tokens: Indices, size: int, first: int = 0) -> Indices:
    """In which row each token of a request lies, where its pages have `size` rows each. `first`: so
    many of its pages come before these."""
    return pages[tokens // size - first] * size + tokens % size


def in_runs(source: Indices, target: Indices) -> tuple[Indices, Indices]:
    """The same pairs, ordered so that two of them, both of whose numbers differ by one, are
    neighbours: what lies side by side on both sides can then be copied at once.

    Where the source indices rise, that is so already; else sorting by distance, then by source.
    """
    if len(source) < 2 or (source[1:] > source[:-1]).all():
        return source, target
    order = np.lexsort((source, target - source))
    return source[order], target[order]


def joined(source: Indices, target: Indices) -> tuple[Indices, Indices, Indices]:
    """Runs of pairs, both of whose numbers rise by one from each pair to the next: the first pair
    of each run, and how many pairs it has; each of shape (runs,)."""
    if not len(source):
        return source, target, source
    # Slices, as np.diff takes ten times as long for a short list.
    breaks = (source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)
    bounds = np.flatnonzero(breaks) + 1
    firsts = np.concatenate(([0], bounds))
    return source[firsts], target[firsts], np.concatenate((bounds, [len(source)])) - firsts


def ring_slots(what: str, segments: Indices, items: int) -> tuple[Indices, int]:
    """The ring slots that SGLang's six numbers name (`get_dsa_tail_state_indices`,
    sglang/srt/disaggregation/utils.py): (row, offset, count, offset, count, ring size), the live
    part of one row in at most two pieces, oldest token first.

    Returns:
        Slots counted through all `items` rows, and how many slots make a row.
    """
    if len(segments) != 6:
        raise ValueError(f"{what}: {len(segments)} numbers; a part of a ring is told in 6")
    row, *spans, ring = (int(number) for number in segments)
    if ring < 1 or not 0 <= row < items:
        raise ValueError(f"{what}: row {row} of {items} in rings of {ring} slots")
    slots = []
    for offset, count in (spans[:2], spans[2:]):
        if min(offset, count) < 0 or offset + count > ring:
            raise ValueError(f"{what}: {count} slots from {offset} on leave a ring of {ring}")
        slots.append(np.arange(offset, offset + count, dtype=np.int64))
    return row * ring + np.concatenate(slots), ring
