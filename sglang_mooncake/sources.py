# SPDX-License-Identifier: Apache-2.0
"""Which prefill ranks one decode rank asks for a room, and which of these have bytes for it."""

from __future__ import annotations

from bootstrap_server import InstanceConfig
from bootstrap_server.ranks import matching
from bootstrap_server.ranks.matching import Source
from sglang_mooncake.layout import Layout, Place

__all__ = ["sources_of"]


def sources_of(
    prefill: InstanceConfig,
    prefill_dp_rank: int,
    place: Place,
    layout: Layout,
    all_cp_ranks: bool = False,
) -> list[tuple[Source, bool]]:
    """The prefill ranks that the decode rank at `place` asks, each with whether it sends.

    A rank that sends nothing (a replica that is not its turn, a CP rank without pages) waits for
    its request like the others, so it is asked, but nothing will ever arrive from it.

    Args:
        prefill: the prefill instance; `prefill_dp_rank` is the group that serves the request.
        layout: what the decode rank stores.
        all_cp_ranks: every CP rank of prefill sends its share.

    Raises:
        MismatchError: the two cannot hand over KV; names both values and the flag.
    """
    cp = matching.cp_transfer(prefill, all_cp_ranks)
    sharded = matching.dealt_over(prefill) > 1
    every_tp_rank = sharded and prefill.topology.cp_size == 1
    chosen = matching.sources(
        prefill.topology, place.topology, place.coords, prefill_dp_rank, cp, every_tp_rank
    )
    if every_tp_rank:
        return [(source, True) for source in chosen]
    sends = [_sends(source, prefill, place, layout) for source in chosen]
    if sharded:
        # The parts of the pages must add up: of a TP rank, all its CP ranks send or none.
        groups = {_group(source) for source, some in zip(chosen, sends, strict=True) if some}
        sends = [_group(source) in groups for source in chosen]
    return list(zip(chosen, sends, strict=True))


def _group(source: Source) -> tuple[int, int]:
    return source.coords.tp, source.coords.pp


def _sends(source: Source, prefill: InstanceConfig, place: Place, layout: Layout) -> bool:
    """Whether any unit of any component is this source's to send. Which layers a pipeline stage
    has is not known here, and need not be: each has some."""
    if source.aux:
        return True
    wanted = [
        component
        for component in layout.components
        if (source.pages.of > 0 if component.state is None else source.state)
    ]
    return any(
        matching.sending(
            total,
            prefill.topology.tp_size,
            source.coords.tp,
            place.topology.tp_size,
            place.coords.tp,
            place.coords.dp,
        )
        for total in {cut.total for component in wanted for cut in component.cuts}
    )
