# SPDX-License-Identifier: Apache-2.0
"""The copy from one rank to another: prepared once per pair, applied to each request's indices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import te
from sglang_mooncake.layout.description import (
    ALONE,
    SEAL_BYTES,
    Component,
    Layout,
    Place,
)
from sglang_mooncake.layout.indices import (
    Indices,
    as_indices,
    check_indices,
    in_runs,
    ring_slots,
)
from sglang_mooncake.layout.pairing import Pair, aux_buffers, pair_buffers
from sglang_mooncake.layout.pieces import pieces

__all__ = ["Plan"]

_NOTHING = te.Blocks.concat([])


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What goes from buffers to their counterparts: the same `pieces` of each item in all of them,
    whatever component they belong to (K and V mostly share).

    kind: of the first of them, for sentences.
    source, target: addresses of the buffers, shape (buffers,).
    segments: items are rows of a ring, of which the slots are copied.
    """

    kind: str
    source: npt.NDArray[np.uint64]
    target: npt.NDArray[np.uint64]
    source_item: int
    target_item: int
    pieces: te.Blocks
    segments: bool

    def blocks(self, source: Indices, target: Indices) -> te.Blocks:
        """The copies of item source[i] to item target[i], which come in runs."""
        return self._in_all_buffers(
            source * self.source_item, target * self.target_item, self.pieces
        )

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
class _Indexed:
    """All shares that one list of indices applies to, and how many items that list can name."""

    shares: tuple[_Share, ...]
    source_items: int
    target_items: int
    slack: int


class Plan:
    """The intersection of two layouts.

    Blocks are as few as the two layouts allow: two bytes share a block whenever they are
    neighbours in one buffer on both sides.

    Raises:
        LayoutMismatch: the two cannot be copied into each other.
    """

    def __init__(
        self,
        source: Layout,
        target: Layout,
        prefill: Place = ALONE,
        decode: Place = ALONE,
    ) -> None:
        """`prefill` and `decode` say which ranks have these layouts: by default the only ones."""
        self._source, self._target = source, target
        pairs = pair_buffers(source, target, prefill, decode)
        moves = aux_buffers(source, target) or []
        self._aux = tuple(
            np.array(of_all, dtype=np.uint64)[moves]
            for of_all in (source.aux.addresses, target.aux.addresses, source.aux.item_nbytes)
        )
        self._kv = _index(None, pairs, source, target, prefill, decode)
        self._states = tuple(
            _index(state, pairs, source, target, prefill, decode)
            for state in range(len(source.states))
        )

    @property
    def sends_kv(self) -> bool:
        """Whether this pair moves any byte of a page; a replica that was not chosen does not."""
        return bool(self._kv.shares)

    @property
    def sends_state(self) -> bool:
        """Whether this pair moves any byte of any state."""
        return any(indexed.shares for indexed in self._states)

    def kv(
        self, source_pages: npt.NDArray[np.integer], target_pages: npt.NDArray[np.integer]
    ) -> te.Blocks:
        """Blocks that copy source_pages[i] to target_pages[i], page numbers of shape (pages,).

        Raises:
            ValueError: lengths differ, or a page lies outside the buffers of its side.
        """
        return _apply("page", self._kv, source_pages, target_pages)

    def state(
        self,
        source_indices: Sequence[npt.ArrayLike | None],
        target_indices: Sequence[npt.ArrayLike | None],
    ) -> te.Blocks:
        """Blocks that copy a request's state: a list of indices per entry of `Layout.states`, as
        SGLang's `send` and `send_metadata` have them. A component without a list moves nothing.

        Raises:
            ValueError: as `kv`, and lists that do not belong to this model.
        """
        for indices in (source_indices, target_indices):
            if len(indices) > len(self._states):
                raise ValueError(f"{len(indices)} state lists; the model has {self._source.states}")
        parts = []
        for name, indexed, ours, theirs in zip(
            self._source.states, self._states, source_indices, target_indices, strict=False
        ):
            if ours is not None and theirs is not None:
                parts.append(_apply(name, indexed, ours, theirs))
        return te.Blocks.concat(parts)

    def aux(self, source_slot: int, target_slot: int) -> te.Blocks:
        """Blocks that copy one request's metadata."""
        source, target = self._source.aux, self._target.aux
        check_indices("prefill metadata slot", np.array([source_slot]), source.items)
        check_indices("decode metadata slot", np.array([target_slot]), target.items)
        source_addresses, target_addresses, item = self._aux
        return te.Blocks.of(
            source_addresses + item * np.uint64(source_slot),
            target_addresses + item * np.uint64(target_slot),
            item,
        )

    def seal(self, source_address: int, target_slot: int) -> te.Blocks:
        """The block that carries the seal from `source_address` (registered memory)."""
        seals = self._target.seals
        check_indices("seal slot", np.array([target_slot]), seals.items)
        return te.Blocks.of(
            [source_address], [seals.addresses[0] + target_slot * SEAL_BYTES], [SEAL_BYTES]
        )


def _index(
    state: int | None,
    pairs: list[Pair],
    source: Layout,
    target: Layout,
    prefill: Place,
    decode: Place,
) -> _Indexed:
    inside = {
        id(one): pieces(one, prefill, decode) for one in source.components if one.state == state
    }
    alike: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        ours, _, theirs, _ = pair
        if ours.state != state:
            continue
        parts = inside[id(ours)]
        if len(parts):
            key = (ours.item_nbytes, theirs.item_nbytes, ours.segments, parts.array.tobytes())
            alike.setdefault(key, []).append(pair)
    shares = []
    for found in alike.values():
        ours, _, theirs, _ = found[0]
        shares.append(
            _Share(
                kind=ours.kind,
                source=_addresses((component, at) for component, at, _, _ in found),
                target=_addresses((component, at) for _, _, component, at in found),
                source_item=ours.item_nbytes,
                target_item=theirs.item_nbytes,
                pieces=inside[id(ours)],
                segments=ours.segments,
            )
        )
    slack = max((c.slack for c in source.components if c.state == state), default=0)
    return _Indexed(tuple(shares), _items(source, state), _items(target, state), slack)


def _addresses(buffers: Iterable[tuple[Component, int]]) -> npt.NDArray[np.uint64]:
    return np.array([one.buffers.addresses[at] for one, at in buffers], dtype=np.uint64)


def _items(layout: Layout, state: int | None) -> int:
    return min(
        (c.buffers.items for c in layout.components if c.state == state and c.layers), default=0
    )


def _apply(
    name: str, indexed: _Indexed, source_indices: npt.ArrayLike, target_indices: npt.ArrayLike
) -> te.Blocks:
    source, target = as_indices(name, source_indices), as_indices(name, target_indices)
    if not indexed.shares:
        return _NOTHING
    if any(share.segments for share in indexed.shares):
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


def _apply_segments(name: str, indexed: _Indexed, source: Indices, target: Indices) -> te.Blocks:
    if not len(source) and not len(target):
        return _NOTHING
    ours, our_ring = ring_slots(f"prefill {name}", source, indexed.source_items)
    theirs, their_ring = ring_slots(f"decode {name}", target, indexed.target_items)
    if len(ours) != len(theirs):
        raise ValueError(f"{name}: prefill has {len(ours)} live slots, decode {len(theirs)}")
    return te.Blocks.concat(
        [share.ring_blocks(ours, our_ring, theirs, their_ring) for share in indexed.shares]
    )
