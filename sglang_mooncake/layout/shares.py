# SPDX-License-Identifier: Apache-2.0
"""Buffers of one rank and their counterparts on another, gathered by the index list that names
their items."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake.layout.description import Component, Place
from sglang_mooncake.layout.indices import (
    Indices,
    as_indices,
    check_indices,
    in_runs,
    joined,
    ring_slots,
)
from sglang_mooncake.layout.layers import EVERY_LAYER, Layers, number_of
from sglang_mooncake.layout.pairing import Pair
from sglang_mooncake.layout.pieces import pieces

__all__ = ["Indexed", "Share", "apply", "index"]

NOTHING = te.Blocks.concat([])


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What goes from buffers to their counterparts: the same `pieces` of each item in all of them,
    whatever component they belong to (K and V mostly share).

    kind: of the first of them, for sentences.
    source, target: addresses of the buffers, shape (buffers,).
    layers: of the buffers, rising, shape (buffers,).
    names: of the buffers, for sentences.
    segments: items are rows of a ring, of which the slots are copied.
    """

    kind: str
    source: npt.NDArray[np.uint64]
    target: npt.NDArray[np.uint64]
    layers: npt.NDArray[np.int64]
    names: tuple[str, ...]
    source_item: int
    target_item: int
    pieces: te.Blocks
    segments: bool

    def of(self, layers: Layers) -> Share:
        """The buffers of these layers alone."""
        begin, end = np.searchsorted(self.layers, (layers.start, layers.stop))
        if end - begin == len(self.layers):
            return self
        some = slice(begin, end)
        return replace(
            self,
            source=self.source[some],
            target=self.target[some],
            layers=self.layers[some],
            names=self.names[some],
        )

    def blocks(self, source: Indices, target: Indices) -> te.Blocks:
        """The copies of item source[i] to item target[i], which come in runs."""
        if self._whole:
            ours, theirs, items = joined(source, target)
            nbytes = items * self.source_item
            ours, theirs = ours * self.source_item, theirs * self.target_item
            return te.Blocks.grid(self.source, ours, self.target, theirs, nbytes)
        return self._in_all_buffers(
            source * self.source_item, target * self.target_item, self.pieces
        )

    @property
    def _whole(self) -> bool:
        """Whether items go whole, so that those side by side on both sides are one block."""
        is_one = len(self.pieces) == 1
        return is_one and self.pieces.total_nbytes == self.source_item == self.target_item

    def ring_blocks(
        self, source: Indices, source_ring: int, target: Indices, target_ring: int
    ) -> te.Blocks:
        """The same for slots of rings whose rows are the items of this share."""
        slot, rest = divmod(self.source_item, source_ring)
        if rest or slot * target_ring != self.target_item:
            raise ValueError(
                f"{self.kind}: rows of {self.source_item} bytes with {source_ring} slots on "
                f"prefill, of {self.target_item} bytes with {target_ring} slots on decode"
            )
        return self._in_all_buffers(source * slot, target * slot, te.Blocks.of(0, 0, slot))

    def _in_all_buffers(self, source: Indices, target: Indices, inside: te.Blocks) -> te.Blocks:
        """Merged within one buffer, then repeated: no block spans two regions."""
        rows = inside.array
        one = te.Blocks.grid(source, rows["src"], target, rows["dst"], rows["nbytes"])
        rows = one.merged().array
        return te.Blocks.grid(self.source, rows["src"], self.target, rows["dst"], rows["nbytes"])


@dataclass(frozen=True, slots=True)
class Indexed:
    """All shares that one list of indices applies to, and how many items that list can name."""

    shares: tuple[Share, ...]
    source_items: int
    target_items: int
    slack: int

    @property
    def segments(self) -> bool:
        return any(share.segments for share in self.shares)

    def of(self, layers: Layers) -> Indexed:
        """The buffers of these layers alone."""
        if layers == EVERY_LAYER:
            return self
        some = (share.of(layers) for share in self.shares)
        return replace(self, shares=tuple(share for share in some if len(share.layers)))


def index(
    pairs: list[Pair],
    prefill: Place,
    decode: Place,
    every_rank: bool,
    by_row: bool,
    slack: int,
) -> Indexed:
    """by_row: the indices name rows of items, not items."""
    inside: dict[tuple[int, int], te.Blocks] = {}
    alike: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        ours, _, theirs, _ = pair
        which = id(ours), id(theirs)
        if which not in inside:
            one = msgspec.structs.replace(ours, rows=1) if by_row else ours
            inside[which] = pieces(one, theirs, prefill, decode, every_rank=every_rank)
        parts = inside[which]
        if len(parts):
            items = ours.item_nbytes, theirs.item_nbytes, ours.rows, theirs.rows
            alike.setdefault((*items, ours.segments, parts.array.tobytes()), []).append(pair)
    shares, source_items, target_items = [], [], []
    for found in alike.values():
        found.sort(key=_number)
        ours, _, theirs, _ = found[0]
        our_rows, their_rows = (ours.rows, theirs.rows) if by_row else (1, 1)
        shares.append(
            Share(
                kind=ours.kind,
                source=_addresses((component, at) for component, at, _, _ in found),
                target=_addresses((component, at) for _, _, component, at in found),
                layers=np.array([_number(pair) for pair in found], np.int64),
                names=tuple(f"{one.kind} of layer {one.layers[at]}" for one, at, _, _ in found),
                source_item=ours.item_nbytes // our_rows,
                target_item=theirs.item_nbytes // their_rows,
                pieces=inside[id(ours), id(theirs)],
                segments=ours.segments,
            )
        )
        source_items += [one.buffers.items * our_rows for one, _, _, _ in found]
        target_items += [one.buffers.items * their_rows for _, _, one, _ in found]
    return Indexed(tuple(shares), min(source_items, default=0), min(target_items, default=0), slack)


def _number(pair: Pair) -> int:
    ours, at, _, _ = pair
    return number_of(ours, ours.layers[at])


def _addresses(buffers: Iterable[tuple[Component, int]]) -> npt.NDArray[np.uint64]:
    return np.array([one.buffers.addresses[at] for one, at in buffers], dtype=np.uint64)


def apply(
    name: str, indexed: Indexed, source_indices: npt.ArrayLike, target_indices: npt.ArrayLike
) -> te.Blocks:
    source, target = as_indices(name, source_indices), as_indices(name, target_indices)
    if not indexed.shares:
        return NOTHING
    if indexed.segments:
        return _apply_segments(name, indexed, source, target)
    if abs(len(source) - len(target)) > indexed.slack:
        raise ValueError(
            f"{name}: prefill names {len(source)} and decode {len(target)} items; "
            "the lists must have one length"
        )
    common = min(len(source), len(target))
    source, target = source[:common], target[:common]
    check_indices(f"prefill {name}", source, indexed.source_items)
    check_indices(f"decode {name}", target, indexed.target_items)
    source, target = in_runs(source, target)
    return te.Blocks.concat([share.blocks(source, target) for share in indexed.shares])


def _apply_segments(name: str, indexed: Indexed, source: Indices, target: Indices) -> te.Blocks:
    if not len(source) and not len(target):
        return NOTHING
    ours, our_ring = ring_slots(f"prefill {name}", source, indexed.source_items)
    theirs, their_ring = ring_slots(f"decode {name}", target, indexed.target_items)
    if len(ours) != len(theirs):
        raise ValueError(f"{name}: prefill has {len(ours)} live slots, decode {len(theirs)}")
    return te.Blocks.concat(
        [share.ring_blocks(ours, our_ring, theirs, their_ring) for share in indexed.shares]
    )
