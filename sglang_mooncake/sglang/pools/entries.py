# SPDX-License-Identifier: Apache-2.0
"""SGLang's pointer lists as tensors with a kind, a layer and an inside: what `kv_args.py` and
`states.py` share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from bootstrap_server.ranks.matching import holding
from sglang_mooncake.layout import Buffers, Component, Place, Units
from sglang_mooncake.layout.pairing import DRAFT

__all__ = [
    "DRAFT",
    "Entry",
    "Heads",
    "KVArgsLike",
    "Pointers",
    "Shape",
    "UnsupportedPool",
    "components",
    "head_cuts",
    "latents",
    "opaque",
    "stage_of",
    "whole",
]


class KVArgsLike(Protocol):
    """The members of SGLang's KVArgs that we read."""

    kv_data_ptrs: list[int]
    kv_data_lens: list[int]
    kv_item_lens: list[int]
    kv_layer_ids: list[int]
    kv_cache_dtype_str: str  # may be "auto": seam.py resolves it
    kv_layout: str | None
    num_draft_entries: int
    aux_data_ptrs: list[int]
    aux_data_lens: list[int]
    aux_item_lens: list[int]
    state_types: list[object]
    state_data_ptrs: list[list[int]]
    state_data_lens: list[list[int]]
    state_item_lens: list[list[int]]
    state_layer_ids: list[list[int]]
    state_dim_per_tensor: list[list[int]]
    state_slice_outer_counts: list[list[int]]
    state_conv_shard_groups: list[list[list[int] | None]]
    swa_kv_cache_layout: str | None
    mla_compression_ratios: list[int] | None
    is_hybrid_mla_backend: bool
    page_size: int
    ib_device: str | None
    gpu_id: int


class UnsupportedPool(ValueError):
    """SGLang gave us a kind of cache that this version cannot hand over."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How many KV heads the model has over all TP ranks, which `KVArgs` tells on prefill alone.

    swa: of its sliding-window layers, where these differ.
    draft: of the draft model; None where that caches MLA latents.
    head_major: heads come before the tokens of a page (HND, vectorized_5d), not after (NHD).
    """

    total: int
    swa: int | None = None
    draft: int | None = None
    head_major: bool = False


@dataclass(frozen=True, slots=True)
class Pointers:
    """Three lists of KVArgs that belong together, of one length."""

    addresses: list[int]
    item_nbytes: list[int]
    nbytes: list[int]

    @staticmethod
    def of(
        what: str, addresses: Sequence[int], item_nbytes: Sequence[int], nbytes: Sequence[int]
    ) -> Pointers:
        if not len(addresses) == len(item_nbytes) == len(nbytes):
            raise ValueError(
                f"{what}: SGLang gave {len(addresses)} pointers, {len(item_nbytes)} item lengths "
                f"and {len(nbytes)} lengths"
            )
        return Pointers(
            [int(address) for address in addresses],
            [int(item) for item in item_nbytes],
            [int(length) for length in nbytes],
        )

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, part: slice) -> Pointers:
        return Pointers(self.addresses[part], self.item_nbytes[part], self.nbytes[part])

    def buffers(self) -> Buffers:
        return Buffers(tuple(self.addresses), tuple(self.item_nbytes), tuple(self.nbytes))


#: The cuts of one item; () of an item of 0 bytes, which SGLang lists to keep positions.
Shape: TypeAlias = tuple[Units, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """What the buffers of one `Pointers` are: see `Component`. `cuts` has a shape per buffer."""

    kind: str
    pointers: Pointers
    layers: Sequence[int]
    cuts: Sequence[Shape]
    rows: int = 1
    numbered: bool = True
    slack: int = 0
    segments: bool = False
    replicated: bool = False
    on_device: bool = False


def whole(pointers: Pointers) -> list[Shape]:
    """Cuts of items that every TP rank stores alike."""
    return [(Units(1, item),) if item else () for item in pointers.item_nbytes]


def latents(pointers: Pointers, tokens: int) -> tuple[list[Shape], int]:
    """Cuts and rows of items that every TP rank stores alike, one row for each of `tokens`; of one
    row where the items are no such thing."""
    if any(item % tokens for item in pointers.item_nbytes):
        return whole(pointers), 1
    return [(Units(1, item // tokens),) if item else () for item in pointers.item_nbytes], tokens


def opaque(pointers: Pointers, tp_size: int) -> list[Shape]:
    """Cuts of items that TP deals out in a way that SGLang does not tell: good for ranks of an
    instance with as many."""
    return [(Units(tp_size, item),) if item else () for item in pointers.item_nbytes]


def head_cuts(
    kind: str, pointers: Pointers, total: int, rows: int, place: Place, all_heads: bool = False
) -> list[Shape]:
    """Cuts of items of `rows` rows, each with the heads that this rank holds of `total`.

    Raises:
        MismatchError: so many heads cannot be dealt out to so many ranks.
        ValueError: the items are no whole number of heads.
    """
    tp_size, tp = place.topology.tp_size, place.coords.tp
    heads = total if all_heads else len(holding(total, tp_size, tp))
    for item in pointers.item_nbytes:
        if not item or item % (rows * heads):
            raise ValueError(
                f"{kind}: an item of {item} bytes is no {rows} rows of {heads} heads, "
                f"which TP rank {tp} of {tp_size} holds of {total}"
            )
    return [(Units(total, item // (rows * heads)),) for item in pointers.item_nbytes]


def stage_of(kv_args: KVArgsLike, place: Place) -> tuple[list[int], list[int]]:
    """DeepSeek-V4: the layers of this pipeline stage, as far as SGLang tells, and how strongly each
    layer of the model is compressed."""
    ratios = [int(ratio) for ratio in kv_args.mla_compression_ratios or ()]
    if place.topology.pp_size == 1:
        return list(range(len(ratios))), ratios
    # Prefill ranks alone have these.
    start, end = (getattr(kv_args, f"prefill_{name}_layer", None) for name in ("start", "end"))
    return ([] if start is None or end is None else list(range(start, end))), ratios


def components(entries: Sequence[Entry], state: int | None = None) -> list[Component]:
    """One component for all buffers of one kind and shape; layers without a buffer of the kind go
    with the first of them."""
    alike: dict[tuple[str, Shape, int], list[tuple[Entry, int]]] = {}
    elided: dict[str, list[int]] = {}
    for entry in entries:
        if not len(entry.layers) == len(entry.cuts) == len(entry.pointers):
            raise ValueError(f"{entry.kind}: {len(entry.pointers)} buffers of {entry.layers}")
        for at, cuts in enumerate(entry.cuts):
            if cuts:
                alike.setdefault((entry.kind, cuts, entry.rows), []).append((entry, at))
            else:
                elided.setdefault(entry.kind, []).append(entry.layers[at])
    made = []
    for (kind, cuts, _), found in alike.items():
        made.append(_component(found[0][0], cuts, found, elided.pop(kind, []), state))
    made.extend(
        _component(entry, (Units(1, 1),), [], elided.pop(entry.kind), state)
        for entry in entries
        if entry.kind in elided
    )
    return made


def _component(
    one: Entry, cuts: Shape, found: list[tuple[Entry, int]], elided: list[int], state: int | None
) -> Component:
    return Component(
        kind=one.kind,
        layers=tuple(entry.layers[at] for entry, at in found),
        buffers=Buffers(
            tuple(entry.pointers.addresses[at] for entry, at in found),
            tuple(entry.pointers.item_nbytes[at] for entry, at in found),
            tuple(entry.pointers.nbytes[at] for entry, at in found),
        ),
        cuts=cuts,
        rows=one.rows,
        numbered=one.numbered,
        elided=tuple(elided),
        state=state,
        slack=one.slack,
        segments=one.segments,
        replicated=one.replicated,
        on_device=one.on_device,
    )
