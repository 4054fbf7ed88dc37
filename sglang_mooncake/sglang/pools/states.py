# SPDX-License-Identifier: Apache-2.0
"""The caches that SGLang keeps beside the KV pages, as tensors: `KVArgs.state_*`, filled by
`setup_state_kv_args` (sglang/srt/disaggregation/utils.py).

Each entry of `state_types` comes with an index list of its own per request. What TP deals out in a
way that we know (heads, channels) can be cut for other TP sizes; what every rank stores alike is
whole; the rest is good for equal TP sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_mooncake.layout import Place, Units
from sglang_mooncake.sglang.pools.entries import (
    DRAFT,
    Entry,
    Heads,
    KVArgsLike,
    Pointers,
    Shape,
    UnsupportedPool,
    head_cuts,
    opaque,
    whole,
)

__all__ = ["Known", "state_entries", "state_names"]


@dataclass(frozen=True, slots=True)
class Known:
    """What has been understood of the KV cache, and what the states share with it.

    layers: those of the model's KV buffers; `numbered` as in `Component`.
    draft_entries: how many further KV buffers the draft model has.
    draft_layers_from: layer numbers from here on are the draft model's; None: none are.
    is_latent: attention caches MLA latents, so that its state is alike on all TP ranks.
    stage, ratios: see `stage_of`; empty unless this is DeepSeek-V4.
    window_layout: how sliding-window pages are laid out, where these hold K and V.
    """

    layers: Sequence[int]
    numbered: bool
    draft_entries: int
    draft_layers_from: int | None
    is_latent: bool
    heads: Heads
    page_size: int
    place: Place
    stage: list[int]
    ratios: list[int]
    window_layout: str | None

    @property
    def tp_size(self) -> int:
        return self.place.topology.tp_size


@dataclass(frozen=True, slots=True)
class _State:
    """One entry of `state_types` with its part of the other lists."""

    name: str
    kind: str  # the name; with a prefix from the second one of a name on
    pointers: Pointers
    layer_ids: list[int]
    dims: list[int]
    rows: list[int]
    groups: list[list[int] | None]


def state_names(kv_args: KVArgsLike) -> tuple[str, ...]:
    """The names of SGLang's state lists, in their order."""
    return tuple(str(getattr(kind, "value", kind)) for kind in kv_args.state_types)


def state_entries(kv_args: KVArgsLike, known: Known) -> list[list[Entry]]:
    """The tensors behind each entry of `state_types`.

    Raises:
        UnsupportedPool: a kind of state that we do not know.
        MismatchError: units that cannot be dealt out to so many ranks.
        ValueError: descriptions that contradict themselves.
    """
    names, made = state_names(kv_args), []
    for at, name in enumerate(names):
        reader = _READERS.get(name)
        if reader is None:
            raise UnsupportedPool(
                f"this model keeps {name} state beside its KV cache, which this version cannot "
                "hand over. Use another --disaggregation-transfer-backend for this model"
            )
        # A second component of a kind is the draft model's, which shares the index list's rules.
        prefix = DRAFT if name in names[:at] else ""
        made.append(reader(_state(kv_args, at, name, prefix + name), known))
    return made


def _state(kv_args: KVArgsLike, at: int, name: str, kind: str) -> _State:
    pointers = Pointers.of(
        name, kv_args.state_data_ptrs[at], kv_args.state_item_lens[at], kv_args.state_data_lens[at]
    )

    def column(values: Sequence[Sequence[Any]]) -> list[Any]:
        found = list(values[at]) if at < len(values) else []
        if found and len(found) != len(pointers):
            raise ValueError(f"{name}: {len(found)} facts about {len(pointers)} buffers")
        return found

    return _State(
        name,
        kind,
        pointers,
        [int(layer) for layer in column(kv_args.state_layer_ids)],
        [int(dim) for dim in column(kv_args.state_dim_per_tensor)],
        [int(rows) for rows in column(kv_args.state_slice_outer_counts)],
        column(kv_args.state_conv_shard_groups),
    )


def _alike(pointers: Pointers, known: Known) -> list[Shape]:
    """Latent attention's state is the same on all TP ranks; of other attention we know nothing."""
    return whole(pointers) if known.is_latent else opaque(pointers, known.tp_size)


def _mamba(state: _State, known: Known) -> list[Entry]:
    """A slot per request: convolution windows and recurrent states, tensor by tensor, each with all
    its layers. TP deals out one axis, or each of the blocks of which that axis is made (`groups`,
    for GDN: query, key, value) by itself; `rows` come before it (Kimi's convolution)."""
    layers, parts = _occurrences(state)
    entries = []
    for at in range(len(state.pointers)):
        one = state.pointers[at : at + 1]
        cuts, rows = _mamba_cuts(state, at, known.tp_size)
        kind = f"{state.kind} {parts[at]}"
        entries.append(Entry(kind, one, [layers[at]], [cuts], rows, bool(state.layer_ids)))
    return entries


def _mamba_cuts(state: _State, at: int, tp_size: int) -> tuple[Shape, int]:
    item = state.pointers.item_nbytes[at]
    dim = state.dims[at] if state.dims else None
    rows = state.rows[at] if state.rows else 1
    groups = state.groups[at] if state.groups else None
    if dim is None:
        return (Units(tp_size, item),), 1  # a slot of unified memory: nobody says what is where
    if dim == 0:
        return (Units(1, item),), 1
    if dim < 0 or rows < 1 or item % (dim * rows):
        raise ValueError(f"{state.kind}: {rows} rows of {dim} channels in {item} bytes")
    channel = item // (dim * rows)
    if groups is None:
        return (Units(dim * tp_size, channel),), rows
    if sum(groups) != dim * tp_size:
        # Key heads that do not divide are stored on several ranks, and SGLang does not say which.
        return (Units(tp_size, item),), 1
    return tuple(Units(int(group), channel) for group in groups), rows


def _occurrences(state: _State) -> tuple[list[int], list[int]]:
    """The layer of each buffer, and how many of the same layer come before it. Without layer
    numbers every buffer counts as a layer."""
    if not state.layer_ids:
        return list(range(len(state.pointers))), [0] * len(state.pointers)
    seen: dict[int, int] = {}
    parts = []
    for layer in state.layer_ids:
        parts.append(seen.get(layer, 0))
        seen[layer] = parts[-1] + 1
    return state.layer_ids, parts


def _window(state: _State, known: Known) -> list[Entry]:
    """Sliding-window layers: a pool like that of the KV cache, with pages of its own."""
    if known.ratios:
        return _compressed_window(state, known)
    layout, pointers = known.window_layout, state.pointers
    # Such pools count their layers from 0 on every pipeline stage.
    numbered = known.place.topology.pp_size == 1
    if layout not in ("nhd", "hnd", "vectorized_5d") or len(pointers) % 2:
        return [_positions(state.kind, pointers, _alike(pointers, known), numbered)]
    half = len(pointers) // 2
    rows = known.page_size if layout == "nhd" else 1
    total = known.heads.swa or known.heads.total
    return [
        Entry(
            f"{state.kind} {name}",
            part,
            range(half),
            head_cuts(state.kind, part, total, rows, known.place),
            rows,
            numbered,
            slack=1,
        )
        for name, part in (("k", pointers[:half]), ("v", pointers[half:]))
    ]


def _positions(kind: str, pointers: Pointers, cuts: list[Shape], numbered: bool) -> Entry:
    return Entry(kind, pointers, range(len(pointers)), cuts, 1, numbered, slack=1)


def _compressed_window(state: _State, known: Known) -> list[Entry]:
    """DeepSeek-V4: windows of all layers, then the compressor's and the indexer's state of those
    that keep every fourth token (`get_state_buf_infos`, mem_cache/deepseek_v4_memory_pool.py)."""
    if state.kind.startswith(DRAFT):
        return [_positions(state.kind, state.pointers, whole(state.pointers), numbered=True)]
    stage, fourth = known.stage, [layer for layer in known.stage if known.ratios[layer] == 4]
    windows = len(state.pointers) - 2 * len(fourth)
    if stage and 0 <= windows <= len(stage):
        spans = [("", stage[:windows]), (" compressor", fourth), (" indexer", fourth)]
        return _spans(state, spans)
    return [_positions(state.kind, state.pointers, whole(state.pointers), numbered=False)]


def _spans(state: _State, spans: list[tuple[str, list[int]]]) -> list[Entry]:
    """Latents of these layers, one span after the other."""
    made, begin = [], 0
    for name, layers in spans:
        part = state.pointers[begin : begin + len(layers)]
        begin += len(layers)
        made.append(Entry(state.kind + name, part, layers, whole(part), slack=1))
    return made


def _window_ring(state: _State, known: Known) -> list[Entry]:
    """DeepSeek-V4's windows as rows of a ring: all layers, or all layers' latents and then all
    layers' rotary parts. The draft model's count from its own first layer."""
    count = len(state.pointers)
    stage = known.stage
    if state.kind.startswith(DRAFT):
        return [Entry(state.kind, state.pointers, range(count), whole(state.pointers))]
    if stage and count in (len(stage), 2 * len(stage)):
        halves = [("", stage), (" rope", stage)][: count // len(stage)]
        return [_exact(entry) for entry in _spans(state, halves)]
    return [Entry(state.kind, state.pointers, range(count), whole(state.pointers), numbered=False)]


def _request_state(state: _State, known: Known) -> list[Entry]:
    """DeepSeek-V4: what the compressor keeps per request in layers that keep every 128th token."""
    layers = [layer for layer in known.stage if known.ratios[layer] == 128]
    if len(layers) == len(state.pointers):
        return [_exact(entry) for entry in _spans(state, [("", layers)])]
    shapes = whole(state.pointers)
    return [Entry(state.kind, state.pointers, range(len(shapes)), shapes, numbered=False)]


def _exact(entry: Entry) -> Entry:
    """Rows that belong together by position: both sides must name as many."""
    return Entry(entry.kind, entry.pointers, entry.layers, entry.cuts, entry.rows, entry.numbered)


def _request_row(state: _State, _known: Known) -> list[Entry]:
    """A row per request, of the draft model alone."""
    kind = state.kind if state.kind.startswith(DRAFT) else DRAFT + state.kind
    return [Entry(kind, state.pointers, range(len(state.pointers)), whole(state.pointers))]


def _indexer(state: _State, known: Known) -> list[Entry]:
    """DSA's index keys, page by page as the KV cache, in the same layers; 0 bytes in those that
    share the choice of another layer. The draft model's come after."""
    main = len(known.layers)
    if len(state.pointers) not in (main, main + known.draft_entries):
        raise ValueError(
            f"{state.kind}: {len(state.pointers)} buffers beside {main} KV buffers and "
            f"{known.draft_entries} of the draft model"
        )
    ours, drafts = state.pointers[:main], state.pointers[main:]
    made = [Entry(state.kind, ours, known.layers, whole(ours), 1, known.numbered, slack=1)]
    if len(drafts):
        made.append(Entry(DRAFT + state.kind, drafts, range(len(drafts)), whole(drafts), slack=1))
    return made


def _indexer_tail(state: _State, known: Known) -> list[Entry]:
    """Tokens that DSA has not yet pooled: a ring per request, keys of all layers and then their
    scores; the draft model's come after."""
    main, count = 2 * len(known.layers), len(state.pointers)
    if count not in (main, main + 2 * known.draft_entries):
        raise ValueError(f"{state.kind}: {count} buffers beside {len(known.layers)} KV buffers")
    made = []
    for prefix, part, layers, numbered in (
        ("", state.pointers[:main], known.layers, known.numbered),
        (DRAFT, state.pointers[main:], range((count - main) // 2), True),
    ):
        half = len(part) // 2
        for name, ring in ((" keys", part[:half]), (" scores", part[half:])):
            if len(ring):
                kind, cuts = prefix + state.kind + name, whole(ring)
                made.append(Entry(kind, ring, layers, cuts, 1, numbered, segments=True))
    return made


def _scales(state: _State, known: Known) -> list[Entry]:
    """Block scales of a quantised pool, for all buffers of that pool. They may be interleaved over
    heads, and SGLang does not say whether they are."""
    window = state.name.endswith("swa")
    numbered = known.numbered and not (window and known.place.topology.pp_size > 1)
    half = len(state.pointers) // 2
    made = []
    for name, part in ((" k", state.pointers[:half]), (" v", state.pointers[half:])):
        layers = range(half) if window or len(known.layers) != half else known.layers
        cuts = opaque(part, known.tp_size)
        made.append(Entry(state.kind + name, part, layers, cuts, 1, numbered, slack=1))
    return made


def _pooled(state: _State, known: Known) -> list[Entry]:
    """QSA's index keys, alike on all TP ranks, with layer numbers; those of the draft model follow
    the model's. A ring that all layers share has a number far above both."""
    layers, parts = _occurrences(state)
    first, count = known.draft_layers_from, len(state.pointers)
    made = []
    for at in range(count):
        prefix = DRAFT if first is not None and first <= layers[at] < first + count else ""
        one = state.pointers[at : at + 1]
        kind = f"{prefix}{state.kind} {parts[at]}"
        made.append(Entry(kind, one, [layers[at]], whole(one), 1, bool(state.layer_ids)))
    return made


def _sparse(state: _State, known: Known) -> list[Entry]:
    """MiniMax: buffers of some layers, of which SGLang tells neither numbers nor inside."""
    cuts = opaque(state.pointers, known.tp_size)
    slack = 1 if state.name == "minimax_index_k" else 0
    layers = range(len(state.pointers))
    return [Entry(state.kind, state.pointers, layers, cuts, 1, numbered=False, slack=slack)]


_READERS: dict[str, Callable[[_State, Known], list[Entry]]] = {
    "mamba": _mamba,
    "swa": _window,
    "swa_ring": _window_ring,
    "c128_state": _request_state,
    "request_row": _request_row,
    "dsa": _indexer,
    "dsa_tail": _indexer_tail,
    "qsa_pending": _pooled,
    "qsa_compressed": _pooled,
    "minimax_index_k": _sparse,
    "minimax_dense_kv": _sparse,
    "block_scale": _scales,
    "block_scale_swa": _scales,
}
