# SPDX-License-Identifier: Apache-2.0
"""The two attention kernels that SGLang's backend `intel_amx` calls, in plain torch.

That backend alone has the forms of attention that speculative decoding needs on a CPU. Its kernels
get buffers of a KV pool [slot, head, dim] and, per request, the slots of its tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["register"]


def register() -> None:
    """Makes them known under the names by which SGLang calls them."""
    operators: Any = torch.ops.sgl_kernel
    operators.extend_attention_cpu = _extend
    operators.decode_attention_cpu = _decode


def _extend(
    query: Any,
    _key: Any,
    _value: Any,
    output: Any,
    keys: Any,
    values: Any,
    _key_scale: float,
    _value_scale: float,
    slots: Any,
    rows: Any,
    seq_lens: Any,
    extend_lens: Any,
    starts: Any,
    _max_extend: int,
    scaling: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
    tree_mask: Any,
    is_causal: bool,
) -> None:
    """Several new tokens of each request, whose keys and values are in the pool already."""
    _refuse(logit_cap, is_cross, window, encoder_lens, sinks, tree_mask, not is_causal)
    output.zero_()  # with DP attention, there are tokens and requests behind the last
    for i in range(seq_lens.numel()):
        total, new, start = int(seq_lens[i]), int(extend_lens[i]), int(starts[i])
        seen = slots[rows[i], :total].long()
        # Token j sees those up to its own position.
        sees = torch.ones(new, total, dtype=torch.bool).tril(total - new)
        output[start : start + new] = _attend(
            query[start : start + new], keys[seen], values[seen], sees, scaling
        )


def _decode(
    query: Any,
    keys: Any,
    values: Any,
    _key_scale: float,
    _value_scale: float,
    output: Any,
    key: Any,
    value: Any,
    new_slots: Any,
    _logits: Any,
    slots: Any,
    rows: Any,
    seq_lens: Any,
    scaling: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
) -> None:
    """One new token of each request; this kernel itself writes its key and value."""
    _refuse(logit_cap, is_cross, window, encoder_lens, sinks)
    if key is not None:
        keys[new_slots] = key.view(-1, *keys.shape[1:])
        values[new_slots] = value.view(-1, *values.shape[1:])
    output.zero_()
    for i in range(seq_lens.numel()):
        seen = slots[rows[i], : int(seq_lens[i])].long()
        output[i : i + 1] = _attend(query[i : i + 1], keys[seen], values[seen], None, scaling)


def _attend(query: Any, keys: Any, values: Any, sees: Any, scaling: float) -> Any:
    """Of [tokens, heads, dim], with fewer heads of keys and values if it must be."""
    parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
    attended = scaled_dot_product_attention(
        *parts, attn_mask=sees, scale=scaling, enable_gqa=keys.shape[1] != query.shape[1]
    )
    return attended.squeeze(0).transpose(0, 1)


def _refuse(*unusual: Any) -> None:
    """No tiny model has any of it."""
    if any(part is not None and part for part in unusual):
        raise NotImplementedError(
            "this form of attention has no stand-in in tests/support/cpu_serving"
        )
