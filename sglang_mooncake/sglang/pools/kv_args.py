# SPDX-License-Identifier: Apache-2.0
"""From SGLang's `KVArgs` to our `Layout` (sglang/srt/disaggregation/base/conn.py; filled by
`_init_kv_manager` in prefill.py and decode.py).

`KVArgs` is lists of pointers whose meaning follows from the class of the pool that made them. What
we conclude is checked against the lengths it gives, so that a pool which is laid out in another way
is refused when a rank starts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bootstrap_server import MismatchError
from sglang_mooncake.layout import ALONE, UNSPLIT, Buffers, Layout, Place, Split
from sglang_mooncake.sglang.pools.entries import (
    DRAFT,
    Entry,
    Heads,
    KVArgsLike,
    Pointers,
    UnsupportedPool,
    components,
    head_cuts,
    latents,
    opaque,
    stage_of,
    whole,
)
from sglang_mooncake.sglang.pools.states import Known, state_entries, state_names

__all__ = [
    "Heads",
    "KVArgsLike",
    "UnsupportedPool",
    "layout_from_kv_args",
    "memory_ranges",
]


def layout_from_kv_args(
    kv_args: KVArgsLike,
    dtype: str,
    is_mla: bool,
    completions: Buffers,
    heads: Heads,
    place: Place = ALONE,
    split: Split = UNSPLIT,
) -> Layout:
    """The rank's memory as SGLang's schedulers describe it.

    Args:
        dtype: of the cached numbers, by name.
        place: this rank's; by default the only one.

    Raises:
        UnsupportedPool: caches that we cannot hand over, or not among so many ranks.
        ValueError: descriptions that contradict themselves.
    """
    _check_scales(kv_args, dtype)
    try:
        entries, known = _kv_entries(kv_args, is_mla, heads, place, split)
        states = state_entries(kv_args, known)
    except MismatchError as error:
        raise UnsupportedPool(str(error)) from error
    made = components(entries)
    for state, tensors in enumerate(states):
        made += components(tensors, state)
    aux = Pointers.of(
        "metadata", kv_args.aux_data_ptrs, kv_args.aux_item_lens, kv_args.aux_data_lens
    )
    return Layout(
        page_size=int(kv_args.page_size),
        dtype=dtype,
        kv_layout=kv_args.kv_layout,
        components=tuple(made),
        aux=aux.buffers(),
        completions=completions,
        states=state_names(kv_args),
        draft_aux=_draft_aux(len(aux)),
        pages_dealt=split.pages_dealt,
        tokens_dealt=split.tokens_dealt,
    )


def _draft_aux(buffers: int) -> int | None:
    """Which of so many metadata buffers has the hidden states that a draft model continues from
    (`MetadataBuffers.get_buf_infos`, disaggregation/utils.py). Its size follows from the draft
    model; without one it is a placeholder. Behind it come the seeds of sparse attention (perhaps),
    the room, and a checksum (perhaps); three buffers for sampling masks (perhaps) come before."""
    if 10 <= buffers <= 12:
        return 8
    return 11 if 13 <= buffers <= 15 else None


def memory_ranges(kv_args: KVArgsLike) -> list[tuple[int, int]]:
    """(address, bytes) of all that a rank's engine must be able to read or write. Unified memory
    names one buffer several times, and layers without a buffer have 0 bytes."""
    ranges = [
        *zip(kv_args.kv_data_ptrs, kv_args.kv_data_lens, strict=True),
        *zip(kv_args.aux_data_ptrs, kv_args.aux_data_lens, strict=True),
    ]
    for addresses, lengths in zip(kv_args.state_data_ptrs, kv_args.state_data_lens, strict=True):
        ranges += zip(addresses, lengths, strict=True)
    return [(int(address), int(nbytes)) for address, nbytes in dict.fromkeys(ranges) if nbytes]


def _kv_entries(
    kv_args: KVArgsLike, is_mla: bool, heads: Heads, place: Place, split: Split
) -> tuple[list[Entry], Known]:
    """The caches that are addressed by KV pages: the model's, then its draft model's."""
    pointers = Pointers.of("KV", kv_args.kv_data_ptrs, kv_args.kv_item_lens, kv_args.kv_data_lens)
    drafts = int(kv_args.num_draft_entries)
    if not 0 <= drafts <= len(pointers):
        raise ValueError(f"{drafts} buffers of the draft model among {len(pointers)} of KV")
    ids = [int(layer) for layer in kv_args.kv_layer_ids]
    if ids and len(ids) != len(pointers):
        raise ValueError(f"{len(ids)} layer numbers for {len(pointers)} KV buffers")
    main, page = len(pointers) - drafts, int(kv_args.page_size)
    is_latent = is_mla or bool(kv_args.is_hybrid_mla_backend)
    _check_heads(kv_args, is_latent, heads)
    first = _first_layer(kv_args, place)
    stage, ratios = stage_of(kv_args, place)
    if ratios:
        ours = _compressed(pointers[:main], stage, ratios, split)
    else:
        total = None if is_latent else heads.total
        pool = _Pool("", total, heads.head_major, page, place, split.whole_heads)
        ours = pool.entries(pointers[:main], ids[:main], first)
    # Of a draft model, each rank keeps every token that its scheduler's pages have.
    tokens = page * split.tokens_dealt.of
    drafter = _Pool(
        DRAFT, heads.draft, heads.head_major, tokens, place, split.whole_heads, split.on_host
    )
    known = Known(
        layers=ours[0].layers if ours else (),
        numbered=bool(ids) or first is not None,
        draft_entries=drafts,
        draft_layers_from=min(ids[main:], default=None),
        is_latent=is_latent,
        heads=heads,
        page_size=page,
        place=place,
        stage=stage,
        ratios=ratios,
        window_layout=kv_args.swa_kv_cache_layout,
    )
    return ours + drafter.entries(pointers[main:], [], 0), known


def _compressed(
    pointers: Pointers, stage: list[int], ratios: list[int], split: Split
) -> list[Entry]:
    """DeepSeek-V4: the latents of layers that keep every fourth token, their indexers' keys, and
    the latents of layers that keep every 128th (`get_contiguous_buf_infos`,
    mem_cache/deepseek_v4_memory_pool.py). Other orders go between alike stages only."""
    fourth = [layer for layer in stage if ratios[layer] == 4]
    last = [layer for layer in stage if ratios[layer] == 128]
    spans = [("c4 latent", fourth), ("c4 indexer", fourth), ("c128 latent", last)]
    if len(pointers) != sum(len(layers) for _, layers in spans):
        if split.on_host:
            raise UnsupportedPool(
                f"{len(pointers)} buffers of a DeepSeek-V4 cache with HiSparse, whose layers need"
                f" {sum(len(layers) for _, layers in spans)}: it is not known which of them are on"
                " the host"
            )
        positions = range(len(pointers))
        return [Entry("latent", pointers, positions, whole(pointers), numbered=False)]
    made, begin = [], 0
    for kind, layers in spans:
        part = pointers[begin : begin + len(layers)]
        begin += len(layers)
        # With HiSparse the latents of every fourth token are on the host, everything else is not.
        on_device = split.on_host and kind != "c4 latent"
        made.append(Entry(kind, part, layers, whole(part), on_device=on_device))
    return made


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pool of KV pages.

    heads: None where it holds latents.
    all_heads: on each TP rank.
    on_device: see `Component`.
    """

    prefix: str
    heads: int | None
    head_major: bool
    page_size: int
    place: Place
    all_heads: bool = False
    on_device: bool = False

    def entries(self, pointers: Pointers, ids: list[int], first: int | None) -> list[Entry]:
        """Latents layer by layer, or the K of all layers and then the V of all layers."""
        numbered, count = bool(ids) or first is not None, len(pointers)
        if self.heads is None:
            layers = ids or [(first or 0) + layer for layer in range(count)]
            shapes, rows = latents(pointers, self.page_size)
            kind = self.prefix + "latent"
            return [Entry(kind, pointers, layers, shapes, rows, numbered, on_device=self.on_device)]
        if count == 1:
            # Unified memory: one region with the pages of all layers, as that pool likes it.
            shapes = opaque(pointers, self.place.topology.tp_size)
            return [Entry(self.prefix + "envelope", pointers, [0], shapes, 1, numbered=False)]
        half, made = count // 2, []
        if count % 2 or ids[:half] != ids[half:]:
            raise ValueError(f"{count} buffers of layers {ids} are not K and V of the same layers")
        layers = ids[:half] or [(first or 0) + layer for layer in range(half)]
        rows = 1 if self.head_major else self.page_size
        for name, part in (("k", pointers[:half]), ("v", pointers[half:])):
            kind = self.prefix + name
            cuts = head_cuts(kind, part, self.heads, rows, self.place, self.all_heads)
            entry = Entry(kind, part, layers, cuts, rows, numbered)
            made.append(replace(entry, replicated=self.all_heads, on_device=self.on_device))
        return made


def _first_layer(kv_args: KVArgsLike, place: Place) -> int | None:
    """The model's number of this rank's first layer with KV; None where SGLang does not say."""
    if place.topology.pp_size == 1 and place.topology.cp_size == 1:
        return 0
    start = getattr(kv_args, "prefill_start_layer", None)  # prefill ranks alone have it
    return None if start is None else int(start)


def _check_heads(kv_args: KVArgsLike, is_latent: bool, heads: Heads) -> None:
    """What prefill ranks are told must be what the model's configuration says."""
    told = int(getattr(kv_args, "total_kv_head_num", 0))
    if told and not is_latent and told != heads.total:
        raise ValueError(
            f"SGLang counts {told} KV heads in the pool, the model's configuration {heads.total}"
        )


def _check_scales(kv_args: KVArgsLike, dtype: str) -> None:
    """Numbers of four bits mean nothing without the scales of their blocks, which SGLang's FP4
    pools keep to themselves."""
    if dtype.startswith("fp4") and "block_scale" not in state_names(kv_args):
        raise UnsupportedPool(
            f"SGLang does not give out the block scales of a {dtype} KV cache, so it cannot be "
            "handed over: choose another --kv-cache-dtype"
        )
