# SPDX-License-Identifier: Apache-2.0
"""The hand-over between SGLang's own KV pools and metadata buffers, MHA and MLA: every byte of the
named pages, and no other, reaches the other pool."""

from __future__ import annotations

import pytest
import torch
from handover import handover

from sglang_mooncake.kv_args import UnsupportedPool, layout_from_kv_args
from sglang_mooncake.layout import Buffers, Layout

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]

SIZE, AUX_SLOTS = 64, 8


class SGLangMemory:
    """One rank's pool and metadata, described through SGLang's KVArgs as its schedulers do it."""

    def __init__(self, kind: str, page_size: int, dtype: torch.dtype, seed: int) -> None:
        from sglang.srt.disaggregation.base.conn import KVArgs
        from sglang.srt.disaggregation.utils import MetadataBuffers, is_mla_backend
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

        common = {
            "size": SIZE,
            "page_size": page_size,
            "dtype": dtype,
            "layer_num": 3,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        if kind == "mla":
            self.pool = MLATokenToKVPool(kv_lora_rank=32, qk_rope_head_dim=8, **common)
            self.buffers = list(self.pool.kv_buffer)
        else:
            self.pool = MHATokenToKVPool(head_num=2, head_dim=16, **common)
            self.buffers = [*self.pool.k_buffer, *self.pool.v_buffer]
        self.is_mla = is_mla_backend(self.pool)
        assert self.is_mla == (kind == "mla")
        self.metadata = MetadataBuffers(
            AUX_SLOTS,
            hidden_size=16,
            hidden_states_dtype=torch.float32,
            max_sampling_mask_tokens=8,
        )
        torch.manual_seed(seed)
        for buffer in self.buffers:
            buffer.view(torch.uint8).random_(0, 256)
        self.metadata.output_ids.random_(0, 1 << 30)
        self.args = KVArgs()
        self.args.kv_data_ptrs, self.args.kv_data_lens, self.args.kv_item_lens = (
            self.pool.get_contiguous_buf_infos()
        )
        self.args.aux_data_ptrs, self.args.aux_data_lens, self.args.aux_item_lens = (
            self.metadata.get_buf_infos()
        )
        self.args.page_size = page_size
        self.args.kv_layer_ids = []
        self.args.state_types = []

    def ranges(self) -> list[tuple[int, int]]:
        kv = zip(self.args.kv_data_ptrs, self.args.kv_data_lens, strict=True)
        aux = zip(self.args.aux_data_ptrs, self.args.aux_data_lens, strict=True)
        return [*kv, *aux]

    def layout(self, seals: Buffers) -> Layout:
        return layout_from_kv_args(self.args, str(self.pool.dtype), self.is_mla, seals)


def pages_of(buffer: torch.Tensor, pages: list[int], page_size: int) -> torch.Tensor:
    slots = torch.tensor([p * page_size + t for p in pages for t in range(page_size)])
    return buffer.view(torch.uint8)[slots]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_move_between_sglangs_own_pools(kind, dtype, page_size):
    source = SGLangMemory(kind, page_size, dtype, seed=1)
    target = SGLangMemory(kind, page_size, dtype, seed=2)
    before = [buffer.clone() for buffer in target.buffers]
    last = SIZE // page_size  # SGLang's pools have one page more than their size: page 0 is unused
    sources, targets = [1, 2, last], [last, 1, 3]
    with handover(source=source, target=target) as pair:
        pair.decode.know(pair.address)
        pair.complete(5, sources, targets, aux=3)
    assert torch.equal(target.metadata.output_ids[3], source.metadata.output_ids[3])
    assert not torch.equal(target.metadata.output_ids[2], source.metadata.output_ids[2])
    untouched = [page for page in range(last + 1) if page not in targets]
    for here, there, old in zip(source.buffers, target.buffers, before, strict=True):
        assert torch.equal(pages_of(there, targets, page_size), pages_of(here, sources, page_size))
        assert torch.equal(
            pages_of(there, untouched, page_size), pages_of(old, untouched, page_size)
        )


def test_pools_with_state_are_refused_by_name():
    from sglang.srt.disaggregation.base.conn import StateType

    memory = SGLangMemory("mha", 4, torch.float32, seed=1)
    memory.args.state_types = [StateType.SWA, StateType.MAMBA]
    with pytest.raises(UnsupportedPool, match="swa, mamba"):
        memory.layout(Buffers((), (), ()))
