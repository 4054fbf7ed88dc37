# SPDX-License-Identifier: Apache-2.0
"""The copy from one rank to another: prepared once per pair, applied to each request's indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

import te
from bootstrap_server.ranks.records import FLAGS
from sglang_mooncake.layout.description import (
    ALONE,
    COMPLETION_BYTES,
    Component,
    Layout,
    Place,
)
from sglang_mooncake.layout.indices import (
    Indices,
    as_indices,
    check_indices,
    check_slot,
    in_runs,
    joined,
    owned,
    ring_slots,
)
from sglang_mooncake.layout.layers import EVERY_LAYER, Layers, number_of
from sglang_mooncake.layout.pairing import DRAFT, Pair, aux_buffers, pair_buffers
from sglang_mooncake.layout.pieces import pieces

__all__ = ["Named", "Plan"]

_NOTHING = te.Blocks.concat([])


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """What a decode rank has named for a request, in the order of its tokens.

    pages: of its KV pool.
    device_pages: of buffers on the device, where `pages` are of host memory (HiSparse).
    prefix_len: tokens before the first page, which it has already.
    first: how many of its pages come before these lists begin: no part needs them all.
    """

    pages: Indices
    device_pages: Indices | None = None
    prefix_len: int = 0
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Share:
    """What goes from buffers to their counterparts: the same `pieces` of each item in all of them,
    whatever component they belong to (K and V mostly share).

    kind: of the first of them, for sentences.
    source, target: addresses of the buffers, shape (buffers,).
    layers: of the buffers, rising, shape (buffers,).
    segments: items are rows of a ring, of which the slots are copied.
    """

    kind: str
    source: npt.NDArray[np.uint64]
    target: npt.NDArray[np.uint64]
    layers: npt.NDArray[np.int64]
    source_item: int
    target_item: int
    pieces: te.Blocks
    segments: bool

    def of(self, layers: Layers) -> _Share:
        """The buffers of these layers alone."""
        begin, end = np.searchsorted(self.layers, (layers.start, layers.stop))
        if end - begin == len(self.layers):
            return self
        some = slice(begin, end)
        return replace(
            self, source=self.source[some], target=self.target[some], layers=self.layers[some]
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
class _Indexed:
    """All shares that one list of indices applies to, and how many items that list can name."""

    shares: tuple[_Share, ...]
    source_items: int
    target_items: int
    slack: int

    @property
    def segments(self) -> bool:
        return any(share.segments for share in self.shares)

    def of(self, layers: Layers) -> _Indexed:
        """The buffers of these layers alone."""
        if layers == EVERY_LAYER:
            return self
        some = (share.of(layers) for share in self.shares)
        return replace(self, shares=tuple(share for share in some if len(share.layers)))


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
        flags: Mapping[str, str] = FLAGS,
    ) -> None:
        """`prefill` and `decode` say which ranks have these layouts: by default the only ones.
        `flags`: see `pair_buffers`."""
        self._source, self._target = source, target
        pairs = pair_buffers(source, target, prefill, decode, flags)
        moves = aux_buffers(source, target) or []
        self._aux = tuple(
            np.array(of_all, dtype=np.uint64)[moves]
            for of_all in (source.aux.addresses, target.aux.addresses, source.aux.item_nbytes)
        )
        # Where TP ranks hold different pages of what they would else hold alike, all of them send.
        every_rank = source.pages_dealt.of > 1 and prefill.topology.cp_size == 1
        # Pages of tokens that are dealt out over decode ranks are cut into their rows.
        by_row = source.tokens_dealt.of != target.tokens_dealt.of

        def index(state: int | None, wanted: Callable[[Component], bool]) -> _Indexed:
            chosen = [pair for pair in pairs if pair[0].state == state and wanted(pair[2])]
            rows = by_row and state is None
            slack = max((c.slack for c in source.components if c.state == state), default=0)
            return _index(chosen, prefill, decode, every_rank, rows, slack)

        self._kv = index(None, lambda one: not one.on_device and not (by_row and _is_draft(one)))
        self._device = index(None, lambda one: one.on_device)
        self._draft_rows = index(None, _is_draft) if by_row else None
        self._states = tuple(index(state, lambda _: True) for state in range(len(source.states)))
        paged = (self._kv, self._device, *filter(None, [self._draft_rows]))
        numbers = [share.layers for one in paged for share in one.shares]
        self._layers = np.unique(np.concatenate([np.empty(0, np.int64), *numbers]))

    @property
    def sends_kv(self) -> bool:
        """Whether this pair moves any byte of a page; a replica that was not chosen does not."""
        drafts = self._draft_rows is not None and self._draft_rows.shares
        return bool(self._kv.shares or self._device.shares or drafts)

    @property
    def sends_state(self) -> bool:
        """Whether this pair moves any byte of any state."""
        return any(indexed.shares for indexed in self._states)

    @property
    def by_layers(self) -> bool:
        """Whether a part may be some layers alone; not where pages are cut into their tokens."""
        return self._draft_rows is None

    def layer_count(self, layers: Layers = EVERY_LAYER) -> int:
        """How many of these layers this pair moves; K and V of one layer are one, and a draft
        model's layers count beside the model's."""
        if layers == EVERY_LAYER:
            return len(self._layers)
        begin, end = np.searchsorted(self._layers, (layers.start, layers.stop))
        return int(end - begin)

    def kv(
        self,
        source_pages: npt.NDArray[np.integer],
        target_pages: npt.NDArray[np.integer],
        layers: Layers = EVERY_LAYER,
    ) -> te.Blocks:
        """Blocks that copy these layers of source_pages[i] to target_pages[i], page numbers of
        shape (pages,).

        Raises:
            ValueError: lengths differ, or a page lies outside the buffers of its side.
        """
        return _apply("page", self._kv.of(layers), source_pages, target_pages)

    def part(
        self,
        pages: npt.NDArray[np.integer],
        first: int,
        named: Named,
        layers: Layers = EVERY_LAYER,
    ) -> te.Blocks:
        """Blocks that bring a part of a request: these layers of `pages` of the prefill side, shape
        (pages,), of which the first is the request's page `first`.

        Raises:
            ValueError: the decode rank has named no place for them, or one outside its buffers, or
                this pair cannot send some layers alone.
        """
        ours = as_indices("page", pages)
        if self._draft_rows is not None:
            if layers != EVERY_LAYER:
                raise ValueError("pages that are cut into their tokens go with all their layers")
            return self._tokens(ours, first, named, self._draft_rows)
        parts, begin = [], first - named.first
        for what, indexed, theirs in (
            ("page", self._kv.of(layers), named.pages),
            ("device page", self._device.of(layers), named.device_pages),
        ):
            if not indexed.shares:
                continue
            if theirs is None:
                raise ValueError(f"decode has named no {what}s")
            span = theirs[begin : begin + len(ours)]
            parts.append(_apply(what, indexed, *self._own(ours, span)))
        return te.Blocks.concat(parts)

    def _own(self, ours: Indices, theirs: Indices) -> tuple[Indices, Indices]:
        """Of pages that are dealt out by their numbers, those that are here, by their places."""
        dealt = self._source.pages_dealt
        if dealt.of == 1:
            return ours, theirs
        if len(ours) != len(theirs):
            raise ValueError(f"{len(ours)} pages on prefill, {len(theirs)} on decode")
        mine = owned(ours, dealt)
        return ours[mine] // dealt.of, theirs[mine]

    def _tokens(self, pages: Indices, first: int, named: Named, draft_rows: _Indexed) -> te.Blocks:
        """Token by token: a page that decode names has the tokens of several of ours, of which it
        stores its own; the draft model's caches all of them."""
        dealt, size = self._target.tokens_dealt, self._source.page_size
        if named.prefix_len % (size * dealt.of):
            raise ValueError(
                f"decode holds {named.prefix_len} tokens of the prompt, which is no whole number "
                f"of its pages of {size * dealt.of}"
            )
        source = (pages[:, None] * size + np.arange(size)).reshape(-1)
        at = first * size + np.arange(len(source))  # in the request, from the first page on
        pages_named = named.first + len(named.pages)
        if len(at) and at[-1] >= pages_named * size * dealt.of:
            raise ValueError(f"decode has named {pages_named} pages for {at[-1] + 1} tokens")

        def rows(tokens: Indices, of_page: int) -> Indices:
            return named.pages[tokens // of_page - named.first] * of_page + tokens % of_page

        mine = at % dealt.of == dealt.index
        return te.Blocks.concat(
            [
                _apply("token", self._kv, source[mine], rows(at[mine] // dealt.of, size)),
                _apply("token", draft_rows, source, rows(at, size * dealt.of)),
            ]
        )

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
                lists = as_indices(name, ours), as_indices(name, theirs)
                if not indexed.segments:
                    lists = self._own(*lists)
                parts.append(_apply(name, indexed, *lists))
        return te.Blocks.concat(parts)

    def aux(self, source_slot: int, target_slot: int) -> te.Blocks:
        """Blocks that copy one request's metadata; none where engines keep none beside the KV
        cache, whatever the slots."""
        source, target = self._source.aux, self._target.aux
        if not source.addresses and not target.addresses:
            return te.Blocks.of([], [], [])
        check_slot("prefill metadata slot", source_slot, source.items)
        check_slot("decode metadata slot", target_slot, target.items)
        source_addresses, target_addresses, item = self._aux
        return te.Blocks.of(
            source_addresses + item * np.uint64(source_slot),
            target_addresses + item * np.uint64(target_slot),
            item,
        )

    def completion(self, source_address: int, target_slot: int) -> te.Blocks:
        """The block that carries a completion record from `source_address` (registered memory)."""
        completions = self._target.completions
        check_slot("slot for a completion record", target_slot, completions.items)
        return te.Blocks.of(
            [source_address],
            [completions.addresses[0] + target_slot * COMPLETION_BYTES],
            [COMPLETION_BYTES],
        )


def _is_draft(component: Component) -> bool:
    return component.kind.startswith(DRAFT)


def _index(
    pairs: list[Pair],
    prefill: Place,
    decode: Place,
    every_rank: bool,
    by_row: bool,
    slack: int,
) -> _Indexed:
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
            _Share(
                kind=ours.kind,
                source=_addresses((component, at) for component, at, _, _ in found),
                target=_addresses((component, at) for _, _, component, at in found),
                layers=np.array([_number(pair) for pair in found], np.int64),
                source_item=ours.item_nbytes // our_rows,
                target_item=theirs.item_nbytes // their_rows,
                pieces=inside[id(ours), id(theirs)],
                segments=ours.segments,
            )
        )
        source_items += [one.buffers.items * our_rows for one, _, _, _ in found]
        target_items += [one.buffers.items * their_rows for _, _, one, _ in found]
    return _Indexed(
        tuple(shares), min(source_items, default=0), min(target_items, default=0), slack
    )


def _number(pair: Pair) -> int:
    ours, at, _, _ = pair
    return number_of(ours, ours.layers[at])


def _addresses(buffers: Iterable[tuple[Component, int]]) -> npt.NDArray[np.uint64]:
    return np.array([one.buffers.addresses[at] for one, at in buffers], dtype=np.uint64)


def _apply(
    name: str, indexed: _Indexed, source_indices: npt.ArrayLike, target_indices: npt.ArrayLike
) -> te.Blocks:
    source, target = as_indices(name, source_indices), as_indices(name, target_indices)
    if not indexed.shares:
        return _NOTHING
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
