# SPDX-License-Identifier: Apache-2.0
"""The copy from one rank to another: prepared once per pair, applied to each request's indices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    check_slot,
    in_rows,
    owned,
    rows_of,
)
from sglang_mooncake.layout.layers import EVERY_LAYER, Layers
from sglang_mooncake.layout.pair_cells import PairCells
from sglang_mooncake.layout.pairing import DRAFT, aux_buffers, pair_buffers
from sglang_mooncake.layout.shares import Indexed, apply, index

__all__ = ["Named", "Plan"]


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
        addresses = source.aux.addresses, target.aux.addresses
        here, there, sizes = (
            np.array(of_all, dtype=np.uint64)[moves]
            for of_all in (*addresses, source.aux.item_nbytes)
        )
        self._aux = here, there, sizes
        # Where TP ranks hold different pages of what they would else hold alike, all of them send.
        every_rank = source.pages_dealt.of > 1 and prefill.topology.cp_size == 1
        # Pages of tokens that are dealt out over decode ranks are cut into their rows.
        by_row = source.tokens_dealt.of != target.tokens_dealt.of

        def indexed(state: int | None, wanted: Callable[[Component], bool]) -> Indexed:
            chosen = [pair for pair in pairs if pair[0].state == state and wanted(pair[2])]
            rows = by_row and state is None
            slack = max((c.slack for c in source.components if c.state == state), default=0)
            return index(chosen, prefill, decode, every_rank, rows, slack)

        self._kv = indexed(None, lambda one: not one.on_device and not (by_row and _is_draft(one)))
        self._device = indexed(None, lambda one: one.on_device)
        self._draft_rows = indexed(None, _is_draft) if by_row else None
        self._states = tuple(indexed(state, lambda _: True) for state in range(len(source.states)))
        paged = (self._kv, self._device, *filter(None, [self._draft_rows]))
        numbers = [share.layers for one in paged for share in one.shares]
        self._layers = np.unique(np.concatenate([np.empty(0, np.int64), *numbers]))
        #: What both ranks make digests of.
        self.cells = PairCells(
            source,
            target,
            (self._kv, self._device, self._draft_rows),
            self._states,
            self._aux,
        )

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
        return apply("page", self._kv.of(layers), source_pages, target_pages)

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
            parts.append(apply(what, indexed, *self._own(ours, span)))
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

    def _tokens(self, pages: Indices, first: int, named: Named, draft_rows: Indexed) -> te.Blocks:
        """Token by token: a page that decode names has the tokens of several of ours, of which it
        stores its own; the draft model's caches all of them."""
        dealt, size = self._target.tokens_dealt, self._source.page_size
        if named.prefix_len % (size * dealt.of):
            raise ValueError(
                f"decode holds {named.prefix_len} tokens of the prompt, which is no whole number "
                f"of its pages of {size * dealt.of}"
            )
        source = in_rows(pages, size)
        at = first * size + np.arange(len(source))  # in the request, from the first page on
        pages_named = named.first + len(named.pages)
        if len(at) and at[-1] >= pages_named * size * dealt.of:
            raise ValueError(f"decode has named {pages_named} pages for {at[-1] + 1} tokens")

        def rows(tokens: Indices, of_page: int) -> Indices:
            return rows_of(named.pages, tokens, of_page, named.first)

        mine = owned(at, dealt)
        return te.Blocks.concat(
            [
                apply("token", self._kv, source[mine], rows(at[mine] // dealt.of, size)),
                apply("token", draft_rows, source, rows(at, size * dealt.of)),
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
                parts.append(apply(name, indexed, *lists))
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
