# SPDX-License-Identifier: Apache-2.0
"""Metadata of requests between servers of which one alone has a draft model (MTP, EAGLE): SGLang's
own buffers, filled and read by SGLang."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from caches import COMPLETIONS

from sglang_mooncake.layout import Layout, Plan
from sglang_mooncake.sglang.pools.kv_args import Heads, layout_from_kv_args

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

SLOTS, ROOM = 4, 77
#: What SGLang makes of the hidden states: a placeholder, and those of a draft model.
PLAIN, DRAFT = (16, torch.float32), (96, torch.bfloat16)


def buffers(hidden, dsa: int = 0, checksum: bool = False, masks: int = 64):
    from sglang.srt.disaggregation.utils import MetadataBuffers

    return MetadataBuffers(
        SLOTS, *hidden, masks, output_dsa_topk_indices_dim=dsa, kv_checksum_enabled=checksum
    )


def layout_of(metadata) -> Layout:
    """The layout of a rank that keeps nothing but this metadata."""
    pointers, lens, item_lens = metadata.get_buf_infos()
    kv_args = SimpleNamespace(
        kv_data_ptrs=[], kv_data_lens=[], kv_item_lens=[], kv_layer_ids=[], kv_layout=None,
        num_draft_entries=0, page_size=1, is_hybrid_mla_backend=False, swa_kv_cache_layout=None,
        mla_compression_ratios=None,
        aux_data_ptrs=pointers, aux_data_lens=lens, aux_item_lens=item_lens,
        state_types=[], state_data_ptrs=[], state_data_lens=[], state_item_lens=[],
    )  # fmt: skip
    return layout_from_kv_args(kv_args, "bfloat16", True, COMPLETIONS, Heads(1, 1))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("dsa", [0, 32])
@pytest.mark.parametrize("checksum", [False, True])
def test_the_draft_models_buffer_is_found_among_all(monkeypatch, masks, dsa, checksum):
    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", "1" if masks else "0")
    metadata = buffers(DRAFT, dsa, checksum)
    layout = layout_of(metadata)
    assert layout.draft_aux is not None
    hidden = metadata.output_hidden_states
    assert layout.aux.addresses[layout.draft_aux] == hidden.data_ptr()
    assert layout.aux.item_nbytes[layout.draft_aux] == hidden[0].nbytes


@pytest.mark.parametrize("dsa", [0, 32])
@pytest.mark.parametrize(("ours", "theirs"), [(PLAIN, DRAFT), (DRAFT, PLAIN), (DRAFT, DRAFT)])
def test_metadata_arrives_as_sglang_wrote_it(ours, theirs, dsa):
    prefill, decode = buffers(ours, dsa), buffers(theirs, dsa)
    request = request_for(prefill, slot=3, drafted=ours == DRAFT, dsa=dsa)
    prefill.set_buf(request)
    before = decode.get_buf(2)
    for source, target, nbytes in Plan(layout_of(prefill), layout_of(decode)).aux(3, 1).array:
        ctypes.memmove(int(target), int(source), int(nbytes))
    sent, got = prefill.get_buf(3), decode.get_buf(1)
    names = ["output_ids", "cached_tokens", "logprobs", "their ids", "top", "their ids"]
    for name, one, other in zip(names, sent, got, strict=False):
        assert torch.equal(one, other), name
    assert int(got[-1][0]) == ROOM
    hidden = got[11]
    if ours == theirs:
        assert torch.equal(sent[11], hidden)
        assert torch.equal(sent[9], got[9])
    else:  # nothing to continue from: as with SGLang's own backend
        assert not hidden.any()
    for one, other in zip(before, decode.get_buf(2), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def request_for(metadata, slot: int, drafted: bool, dsa: int):
    logprob = SimpleNamespace(
        output_token_logprobs_val=[-0.5], output_token_logprobs_idx=[9],
        output_top_logprobs_val=[[-0.5, -0.7]], output_top_logprobs_idx=[[9, 8]],
    )  # fmt: skip
    return SimpleNamespace(
        metadata_buffer_index=slot, output_ids=[9], bootstrap_room=ROOM, cached_tokens=5,
        cached_tokens_device=4, cached_tokens_host=1, cached_tokens_storage=0,
        get_mm_token_counts=lambda: (0, 0, 0), return_logprob=True, logprob=logprob,
        return_sampling_mask=False,
        hidden_states_tensor=torch.arange(96, dtype=torch.bfloat16) if drafted else None,
        output_topk_p=torch.tensor([0.25, 0.75]), output_topk_index=torch.tensor([9, 8]),
        output_dsa_topk_indices=torch.arange(dsa, dtype=torch.int32) if dsa else None,
    )  # fmt: skip
