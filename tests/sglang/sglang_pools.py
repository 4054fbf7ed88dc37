# SPDX-License-Identifier: Apache-2.0
"""Ranks whose caches are SGLang's own pools on the CPU, described by SGLang's own
`_init_kv_manager`, and filled by what a model with one TP rank would hold: each rank takes its
heads and channels from it by slicing tensors, which is all that is assumed about memory here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from caches import COMPLETIONS

from bootstrap_server.ranks.matching import holding
from sglang_mooncake.layout import ALONE, UNSPLIT, Layout, Place, Split
from sglang_mooncake.sglang.pools.kv_args import Heads, layout_from_kv_args, memory_ranges

SLOTS, AUX_SLOTS = 64, 4


@dataclass
class View:
    """One tensor of a rank, as bytes with items first, and how to cut it from the whole model's.

    state: the index list that names its items; None: KV pages.
    whole: shape of an item in a model with one TP rank, in bytes.
    take: the rank's part of such items.
    """

    name: str
    local: torch.Tensor
    whole: tuple[int, ...]
    take: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    state: int | None = None

    def values(self, items: int) -> torch.Tensor:
        """What the model holds in its first `items` items; the same for every rank."""
        seed = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(self.name)))
        everything = torch.randint(0, 256, (items, *self.whole), generator=seed)
        return self.take(everything.to(torch.uint8))


@dataclass
class Caches:
    """The pools of one rank."""

    pool: Any
    views: list[View]
    heads: Heads
    draft: Any = None
    total_heads: int = 1
    state_names: tuple[str, ...] = ()
    full_layers: list[int] = field(default_factory=list)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def tokens(buffer: torch.Tensor, page: int) -> torch.Tensor:
    """A buffer of token slots as pages of them."""
    raw = as_bytes(buffer)
    return raw.view(raw.shape[0] // page, page, *raw.shape[1:])


def head_slice(total: int, place: Place, axis: int) -> Callable[[torch.Tensor], torch.Tensor]:
    held = holding(total, place.topology.tp_size, place.coords.tp)
    return lambda whole: whole.narrow(axis, held.start, len(held))


def attention_views(
    pool: Any, total: int, page: int, place: Place, name: str = "", state: int | None = None
) -> list[View]:
    """K and V of an MHA pool: [slots, heads, head dim]."""
    views = []
    for letter, buffers in (("k", pool.k_buffer), ("v", pool.v_buffer)):
        for layer, buffer in enumerate(buffers):
            local = tokens(buffer, page)
            views.append(
                View(
                    f"{name}{letter}{pool.start_layer + layer}",
                    local,
                    (page, total, local.shape[-1]),
                    head_slice(total, place, 2),
                    state,
                )
            )
    return views


def latent_views(pool: Any, page: int, first: int = 0) -> list[View]:
    views = []
    for layer, buffer in enumerate(pool.kv_buffer):
        local = tokens(buffer, page)
        views.append(View(f"latent{first + layer}", local, tuple(local.shape[1:])))
    return views


def base(page: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {
        "size": SLOTS,
        "page_size": page,
        "dtype": dtype,
        "device": "cpu",
        "enable_memory_saver": False,
    }


def local_heads(total: int, place: Place) -> int:
    return len(holding(total, place.topology.tp_size, place.coords.tp))


def stage(layers: int, place: Place) -> tuple[int, int]:
    size, rank = place.topology.pp_size, place.coords.pp
    return rank * layers // size, (rank + 1) * layers // size


def mha(
    place: Place,
    page: int,
    total: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    v_dim: int = 16,
    drafted: bool = False,
) -> Caches:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    first, end = stage(4, place)
    pool = MHATokenToKVPool(
        head_num=local_heads(total, place), head_dim=16, v_head_dim=v_dim, layer_num=end - first,
        start_layer=first, end_layer=end - 1, **base(page, dtype),
    )  # fmt: skip
    views = attention_views(pool, total, page, place)
    draft = None
    if drafted:
        draft = MHATokenToKVPool(
            head_num=local_heads(2, place), head_dim=16, layer_num=1, **base(page, dtype)
        )
        views += attention_views(draft, 2, page, place, "draft ")
    return Caches(pool, views, Heads(total, draft=2), draft, total_heads=total)


def mla(place: Place, page: int, draft_page: int | None = None) -> Caches:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    first, end = stage(3, place)
    pool = MLATokenToKVPool(
        kv_lora_rank=32, qk_rope_head_dim=8, layer_num=end - first, start_layer=first,
        end_layer=end - 1, **base(page),
    )  # fmt: skip
    views, draft = latent_views(pool, page, first), None
    if draft_page is not None:
        draft = MLATokenToKVPool(
            kv_lora_rank=32, qk_rope_head_dim=8, layer_num=1,
            **{**base(draft_page), "size": SLOTS * draft_page // page},
        )  # fmt: skip
        views += latent_views(draft, draft_page, 100)
    return Caches(pool, views, Heads(1), draft)


def mxfp8(place: Place, page: int) -> Caches:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolMXFP8

    pool = MHATokenToKVPoolMXFP8(
        head_num=local_heads(4, place), head_dim=64, layer_num=2, **base(page, torch.float8_e4m3fn)
    )
    views = attention_views(pool, 4, page, place)
    for letter, buffers in (("k", pool.k_scale_buffer), ("v", pool.v_scale_buffer)):
        for layer, buffer in enumerate(buffers):
            raw = as_bytes(buffer)
            local = raw if pool.mxfp8_sf_interleaved else tokens(buffer, page)
            views.append(View(f"scale {letter}{layer}", local, tuple(local.shape[1:]), state=0))
    return Caches(pool, views, Heads(4), total_heads=4, state_names=("block_scale",))


def swa(place: Place, page: int) -> Caches:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    heads = local_heads(4, place)
    pool = SWAKVPool(
        size=SLOTS, size_swa=SLOTS, page_size=page, dtype=torch.bfloat16, head_num=heads,
        head_dim=16, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1], device="cpu",
    )  # fmt: skip
    views = attention_views(pool.full_kv_pool, 4, page, place)
    views += attention_views(pool.swa_kv_pool, 4, page, place, "window ", 0)
    return Caches(pool, views, Heads(4), total_heads=4, state_names=("swa",))


def _mamba_views(pool: Any, place: Place, groups: list[int], axis: int, heads: int) -> list[View]:
    """Slots of [channels, window] or [window, channels], and of [heads, …]; channels are blocks of
    query, key and value, each dealt out by itself."""
    size, rank = place.topology.tp_size, place.coords.tp

    def channels(whole: torch.Tensor) -> torch.Tensor:
        parts = torch.split(whole, groups, dim=axis)
        return torch.cat([torch.chunk(part, size, dim=axis)[rank] for part in parts], dim=axis)

    views = []
    for layer, number in enumerate(pool.mamba_layer_ids):
        conv = pool.mamba_cache.conv[0][layer]
        # Channels as whole elements, so that slicing cuts between them.
        raw = as_bytes(conv.unsqueeze(-1))
        shape = list(raw.shape[1:])
        shape[axis - 1] = sum(groups)
        views.append(View(f"conv{number}", raw, tuple(shape), channels, 0))
        temporal = as_bytes(pool.mamba_cache.temporal[layer])
        whole = (heads, *temporal.shape[2:])
        views.append(View(f"temporal{number}", temporal, whole, head_slice(heads, place, 1), 0))
    return views


def gdn(place: Place, page: int, whole_heads: bool = False) -> Caches:
    """Linear attention as Qwen3-Next's beside MHA."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    groups, layers = [16, 16, 32], [0, 2, 4]
    shape = Mamba2StateShape.create(
        tp_world_size=place.topology.tp_size, intermediate_size=32, n_groups=4, num_heads=8,
        head_dim=4, state_size=4, conv_kernel=4, conv_shard_groups=groups,
    )  # fmt: skip
    mamba = MambaPool(
        size=SLOTS // page, spec_state_size=0,
        cache_params=Mamba2CacheParams(layers=layers, shape=shape), mamba_layer_ids=layers,
        device="cpu",
    )  # fmt: skip
    attention = ALONE if whole_heads else place
    pool = HybridLinearKVPool(
        size=SLOTS, dtype=torch.bfloat16, page_size=page, head_num=local_heads(4, attention),
        head_dim=16, full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=mamba,
    )  # fmt: skip
    views = attention_views(pool.full_kv_pool, 4, page, attention)
    views += _mamba_views(mamba, place, groups, 1, 8)
    return Caches(pool, views, Heads(4), total_heads=4, state_names=("mamba",), full_layers=[1, 3])


def qsa(place: Place, page: int, whole_heads: bool = False) -> Caches:
    """Attention over pooled keys beside linear attention; the keys are alike on all ranks."""
    from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

    linear = gdn(place, page, whole_heads)
    attention = ALONE if whole_heads else place
    pool = QSATokenToKVPool(
        size=SLOTS, dtype=torch.bfloat16, page_size=page, head_num=local_heads(4, attention),
        head_dim=16, full_attention_layer_ids=[1, 3], device="cpu",
        mamba_pool=linear.pool.mamba_pool, qsa_index_kv_heads=1, qsa_index_head_dim=128,
        qsa_compress_ratio=4, qsa_token_topk=16, num_request_slots=8,
    )  # fmt: skip
    views = attention_views(pool.full_kv_pool, 4, page, attention)
    views += [view for view in linear.views if view.state == 0]
    rings = [*pool.qsa_key_state_buffer_pool, pool.qsa_rope_position_buffer]
    for name, state, buffers, rows in (
        ("pending", 1, rings, pool.qsa_compress_ratio),
        ("compressed", 2, pool.qsa_compressed_k_buffer_pool, pool.qsa_compressed_page_size),
    ):
        for at, buffer in enumerate(buffers):
            local = tokens(buffer, rows)
            views.append(View(f"{name}{at}", local, tuple(local.shape[1:]), state=state))
    return Caches(
        pool, views, Heads(4), total_heads=4, full_layers=[1, 3],
        state_names=("mamba", "qsa_pending", "qsa_compressed"),
    )  # fmt: skip


def kimi(place: Place, page: int) -> Caches:
    """Linear attention as Kimi's (window before channels) beside MLA."""
    from sglang.srt.configs.mamba_utils import KimiLinearCacheParams, KimiLinearStateShape
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool

    layers = [0, 2]
    shape = KimiLinearStateShape.create(
        tp_world_size=place.topology.tp_size, num_heads=8, head_dim=4, num_k_heads=4, head_k_dim=4
    )
    mamba = MambaPool(
        size=SLOTS // page, spec_state_size=0,
        cache_params=KimiLinearCacheParams(layers=layers, shape=shape), mamba_layer_ids=layers,
        device="cpu",
    )  # fmt: skip
    pool = HybridLinearKVPool(
        size=SLOTS, dtype=torch.bfloat16, page_size=page, head_num=1, head_dim=16,
        full_attention_layer_ids=[1, 3], device="cpu", mamba_pool=mamba, use_mla=True,
        kv_lora_rank=32, qk_rope_head_dim=8,
    )  # fmt: skip
    views = latent_views(pool.full_kv_pool, page)
    views += _mamba_views(mamba, place, [32, 16, 16], 2, 8)
    return Caches(pool, views, Heads(1), state_names=("mamba",), full_layers=[1, 3])


def dsa(place: Place, page: int, kpool: int = 4) -> Caches:
    """DeepSeek sparse attention, every fourth token pooled; layer 1 shares its choice of tokens."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    page = kpool * 64
    first, end = stage(3, place)
    pool = DSATokenToKVPool(
        kv_lora_rank=32, qk_rope_head_dim=8, layer_num=end - first, index_head_dim=128,
        kv_cache_dim=40, index_kpool=kpool, index_kpool_compress=kpool > 1, max_running_requests=6,
        tail_extra_slots=2, skip_topk_layers=[layer == 1 for layer in range(first, end)],
        start_layer=first, end_layer=end - 1,
        **{**base(page), "size": 10 * page},
    )  # fmt: skip
    views = latent_views(pool, page, first)
    for layer, buffer in enumerate(pool.index_k_with_scale_buffer):
        if buffer.shape[0]:
            raw = as_bytes(buffer)
            views.append(View(f"index{first + layer}", raw, tuple(raw.shape[1:]), state=0))
    names = ("dsa", "dsa_tail") if kpool > 1 else ("dsa",)
    return Caches(pool, views, Heads(1), state_names=names)


MODELS: dict[str, Callable[[Place, int], Caches]] = {
    "mha": mha,
    "mha with short values": lambda place, page: mha(place, page, v_dim=8),
    "gqa with fewer heads than ranks": lambda place, page: mha(place, page, total=2),
    "mha in fp8": lambda place, page: mha(place, page, dtype=torch.float8_e4m3fn),
    "mha with a draft model": lambda place, page: mha(place, page, drafted=True),
    "mla": mla,
    "mla with a draft model": lambda place, page: mla(place, page, draft_page=page),
    "mxfp8": mxfp8,
    "swa": swa,
    "gdn": gdn,
    "qsa": qsa,
    "kimi": kimi,
    "dsa": dsa,
    "dsa with a key for each token": lambda place, page: dsa(place, page, kpool=1),
}


#: Those of a rank whose KV cache is split in another way than over TP ranks.
SPLIT_MODELS: dict[str, Callable[[Place, int], Caches]] = {
    "mla with a draft model, two ranks' tokens in a page": lambda place, page: mla(
        place, page, draft_page=2 * page
    ),
    "gdn with all heads": lambda place, page: gdn(place, page, whole_heads=True),
    "qsa with all heads": lambda place, page: qsa(place, page, whole_heads=True),
}


class Rank:
    """A rank of a prefill or decode server that serves one of `MODELS`, or of `SPLIT_MODELS`."""

    def __init__(
        self, model: str, role: str, place: Place, page: int, split: Split = UNSPLIT
    ) -> None:
        from sglang.srt.disaggregation.utils import MetadataBuffers, is_mla_backend
        from sglang.srt.runtime_context import get_parallel

        self.role, self.place, self.split = role, place, split
        with get_parallel().override(attn_dcp_size=1):
            self.caches = (MODELS | SPLIT_MODELS)[model](place, page)
        pool = self.caches.pool
        self.page = pool.page_size
        self.is_mla = is_mla_backend(pool)
        self.metadata = MetadataBuffers(
            AUX_SLOTS, hidden_size=16, hidden_states_dtype=torch.float32, max_sampling_mask_tokens=8
        )
        if role == "prefill":
            for view in self.caches.views:
                view.local.copy_(view.values(view.local.shape[0]))
            self.metadata.output_ids.random_(1, 1 << 30)
        else:
            for view in self.caches.views:
                view.local.fill_(0xEE)
        self.kv_args = self._kv_args()

    def _kv_args(self) -> Any:
        """What SGLang's scheduler gives to its backend for these pools."""
        import sglang.srt.disaggregation.decode as decode
        import sglang.srt.disaggregation.prefill as prefill
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

        def classes(_backend: Any, kind: Any) -> Any:
            if kind == KVClassType.KVARGS:
                return KVArgs
            return lambda args, *_others: SimpleNamespace(kv_args=args)

        model_config = SimpleNamespace(
            hf_text_config=SimpleNamespace(full_attention_layer_ids=self.caches.full_layers),
            num_hidden_layers=8,
            get_total_num_kv_heads=lambda: self.caches.total_heads,
        )
        runner = SimpleNamespace(kv_cache_dtype_str="auto")
        scheduler = SimpleNamespace(
            rust_server=None,
            tp_worker=SimpleNamespace(model_runner=runner),
            model_config=model_config,
            server_args=None,
            enable_hisparse=False,
        )
        coords, sizes = self.place.coords, self.place.topology
        queue = SimpleNamespace(
            scheduler=scheduler,
            tp_rank=coords.tp,
            pp_rank=coords.pp,
            transfer_backend=TransferBackend.MOONCAKE,
            token_to_kv_pool=self.caches.pool,
            draft_token_to_kv_pool=self.caches.draft,
            is_mla_backend=self.is_mla,
            metadata_buffers=self.metadata,
            enable_staging=False,
        )
        parallel = SimpleNamespace(
            dp_rank=0, attn_tp_size=sizes.tp_size, pp_group=SimpleNamespace(is_last_rank=True)
        )
        disagg = SimpleNamespace(
            disaggregation_ib_device=None, disaggregation_decode_host_receive_threshold=1
        )
        module, owner = (
            (prefill, prefill.PrefillBootstrapQueue)
            if self.role == "prefill"
            else (decode, decode.DecodePreallocQueue)
        )
        with mock.patch.multiple(
            module,
            get_kv_class=classes,
            get_parallel=lambda: parallel,
            get_disagg=lambda: disagg,
            get_device=lambda: SimpleNamespace(gpu_id=0),
        ):
            return owner._init_kv_manager(queue).kv_args

    def layout(self) -> Layout:
        facts = self.kv_args, "bfloat16", self.is_mla, COMPLETIONS, self.caches.heads
        return layout_from_kv_args(*facts, self.place, self.split)

    def ranges(self) -> list[tuple[int, int]]:
        return memory_ranges(self.kv_args)

    def mismatches(self, moved: dict[int | None, list[tuple[int, int]]]) -> list[str]:
        """The tensors of a decode rank that do not hold what they must once all of `moved`, (source
        item, target item) pairs for each index list, has come."""
        wrong = []
        for view in self.caches.views:
            expected = torch.full_like(view.local, 0xEE)
            whole = view.values(view.local.shape[0])
            for source, target in moved.get(view.state, []):
                expected[target] = whole[source]
            if not torch.equal(expected, view.local):
                wrong.append(view.name)
        return wrong
