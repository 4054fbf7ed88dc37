# SPDX-License-Identifier: Apache-2.0
"""Every pair of ranks that one request joins, planned by the hand-over's own planner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bootstrap_server import InstanceConfig, KVFormat, RankCoords, Topology
from bootstrap_server.ranks.matching import (
    PageShare,
    Source,
    check_configs,
    dealt_over,
    holding,
    sending,
)
from sglang_mooncake.layout import (
    ALL,
    UNSPLIT,
    Buffers,
    Component,
    Dealt,
    Layout,
    Named,
    Place,
    Plan,
    Split,
    Units,
)
from sglang_mooncake.sglang.dry_run.models import ModelShape
from sglang_mooncake.sources import sources_of

__all__ = ["TOKENS", "Move", "PairPlan", "Server", "plan_pairs"]

#: What the figures are per.
TOKENS = 1_000
#: Of a made-up buffer: more pages than any plan here names.
_ITEMS = 1 << 20
_AUX = Buffers((1 << 20,), (1 << 10,), (1 << 14,))
_NO_COMPLETIONS = Buffers((), (), ())


@dataclass(frozen=True, slots=True)
class Move:
    """What one rank sends to another for a prompt of `TOKENS` tokens, in whole pages.

    blocks, blocks_in_runs: contiguous copies when no two pages of the prompt are neighbours in
        memory, and when all are.
    heads: how many of the KV heads (or latents) move; layers: of how many layers.
    is_sliced: less than what either rank keeps of a token and layer, so pages go in pieces.
    """

    nbytes: int
    blocks: int
    blocks_in_runs: int
    heads: int
    layers: int
    is_sliced: bool


@dataclass(frozen=True, slots=True)
class PairPlan:
    """A prefill rank that a decode rank asks. move: None when it has nothing to send."""

    prefill: RankCoords
    decode: RankCoords
    destinations: int
    has_aux: bool
    pages: PageShare
    move: Move | None


@dataclass(frozen=True, slots=True)
class Server:
    """One instance, as far as it matters for its KV cache."""

    model: ModelShape
    topology: Topology
    page_size: int
    dcp_size: int = 1
    kv_cache_sharding: bool = False
    decode_allocation_policy: str = "early"

    @property
    def config(self) -> InstanceConfig:
        return InstanceConfig(
            self.topology,
            KVFormat(self.page_size, self.model.dtype),
            decode_allocation_policy=self.decode_allocation_policy,
            enable_kv_cache_sharding=self.kv_cache_sharding,
            dcp_size=self.dcp_size,
        )

    def split(self, coords: RankCoords) -> Split:
        """How this rank's caches are split beside TP and stages."""
        over = dealt_over(self.config)
        index = coords.cp if self.topology.cp_size > 1 else coords.tp
        return Split(
            Dealt(index, over) if over > 1 else ALL,
            Dealt(coords.tp % self.dcp_size, self.dcp_size),
        )


def plan_pairs(
    prefill: Server, decode: Server, *, all_cp_ranks: bool = False
) -> Iterator[PairPlan]:
    """All pairs of prefill DP group 0 with every decode rank. Other prefill groups are alike: a
    request stays inside one group of either side.

    Raises:
        MismatchError, LayoutMismatch: the hand-over would refuse these servers.
    """
    check_configs(prefill.config, decode.config)
    planner = _Planner(prefill, decode)
    for coords in decode.topology.coords():
        place = Place(decode.topology, coords)
        layout = planner.layout(place, decode.split(coords))
        for source, sends in sources_of(prefill.config, 0, place, layout, all_cp_ranks):
            sender = Place(prefill.topology, source.coords)
            move = planner.move(sender, place, source) if sends else None
            yield PairPlan(
                source.coords,
                coords,
                source.destinations,
                source.aux,
                source.pages,
                move if move is not None and move.nbytes else None,
            )


class _Planner:
    """Plans pairs of ranks. Those that are alike up to addresses are planned once."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self._servers = prefill, decode
        self._model, self._page_size = prefill.model, prefill.page_size
        self._pages = -(-TOKENS // prefill.page_size)
        self._moves: dict[tuple[object, ...], Move] = {}

    def layout(self, place: Place, split: Split = UNSPLIT) -> Layout:
        """What the rank at `place` stores, at made-up addresses."""
        model, heads = self._model, self._heads
        held = len(holding(heads, place.topology.tp_size, place.coords.tp))
        layers = _stage_layers(model.layers, place)
        components = []
        for nth, (kind, width) in enumerate(self._kinds):
            unit = Units(heads, width * model.dtype_nbytes)
            item = self._page_size * held * unit.nbytes
            addresses = tuple((nth * model.layers + layer + 1) << 44 for layer in layers)
            buffers = Buffers(addresses, (item,) * len(layers), (item * _ITEMS,) * len(layers))
            components.append(
                Component(kind, tuple(layers), buffers, (unit,), rows=self._page_size)
            )
        return Layout(
            self._page_size,
            model.dtype,
            None,
            tuple(components),
            aux=_AUX,
            completions=_NO_COMPLETIONS,
            pages_dealt=split.pages_dealt,
            tokens_dealt=split.tokens_dealt,
        )

    def move(self, prefill: Place, decode: Place, source: Source) -> Move:
        key = (
            source.pages,
            self._servers[0].split(prefill.coords),
            self._servers[1].split(decode.coords),
            self._units_within(prefill, decode),
            prefill.coords.pp,
            prefill.topology,
            decode.coords.pp,
            decode.topology,
        )
        if key not in self._moves:
            self._moves[key] = self._plan(prefill, decode, source)
        return self._moves[key]

    @property
    def _heads(self) -> int:
        return self._model.heads or 1

    @property
    def _kinds(self) -> list[tuple[str, int]]:
        if self._model.heads is None:
            return [("latent", self._model.width[0])]
        return [("k", self._model.width[0]), ("v", self._model.width[1])]

    def _units_within(self, prefill: Place, decode: Place) -> tuple[int, int, int]:
        """Where the units that this pair moves lie inside those of either rank, and how many."""
        places = (
            (prefill.topology.tp_size, prefill.coords.tp),
            (decode.topology.tp_size, decode.coords.tp),
        )
        sent = sending(self._heads, *places[0], *places[1], decode.coords.dp)
        ours, theirs = (holding(self._heads, *place).start for place in places)
        return sent.start - ours, sent.start - theirs, len(sent)

    def _plan(self, prefill: Place, decode: Place, source: Source) -> Move:
        splits = [
            server.split(place.coords)
            for server, place in zip(self._servers, (prefill, decode), strict=True)
        ]
        ours, theirs = self.layout(prefill, splits[0]), self.layout(decode, splits[1])
        plan = Plan(ours, theirs, prefill, decode)
        span = source.pages.bounds(self._pages)
        numbers = np.arange(span.start, span.stop)
        # Each rank shall have its part of the numbers, and no two of them side by side.
        step = 2 if splits[0].pages_dealt == ALL else 2 * splits[0].pages_dealt.of + 1
        named = np.arange(-(-self._pages * ours.tokens_dealt.of // theirs.tokens_dealt.of))
        apart = plan.part(step * numbers, span.start, Named(2 * named))
        in_runs = plan.part(numbers, span.start, Named(named))
        _, _, heads = self._units_within(prefill, decode)
        if self._model.heads is None:
            heads = 1
        layers = len(
            set(_stage_layers(self._model.layers, prefill))
            & set(_stage_layers(self._model.layers, decode))
        )
        nbytes = apart.total_nbytes
        whole = [layout.components[0].item_nbytes for layout in (ours, theirs)]
        moved = self._page_size * heads * self._kinds[0][1] * self._model.dtype_nbytes
        return Move(
            nbytes=nbytes,
            blocks=len(apart),
            blocks_in_runs=len(in_runs),
            heads=heads,
            layers=layers,
            is_sliced=heads > 0 and moved < max(whole),
        )


def _stage_layers(layers: int, place: Place) -> range:
    """As SGLang cuts a model into pipeline stages (`get_pp_indices`, sglang/srt/distributed/
    utils.py): the last `layers % stages` stages have one layer more."""
    stage, stages = place.stage
    least, larger = divmod(layers, stages)
    first = stage * least + max(0, stage - (stages - larger))
    return range(first, first + least + (stage >= stages - larger))
