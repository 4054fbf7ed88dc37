# SPDX-License-Identifier: Apache-2.0
"""Routed experts of one EP rank in plain torch. SGLang's own torch code for them takes -1, the
number of an expert that another rank has, for an index."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch.nn.functional import linear, silu

__all__ = ["patch"]


def patch(module: ModuleType) -> None:
    """Leaves tokens of which this rank has all experts to SGLang."""
    forward = module.moe_forward_native

    def wrapped(layer: Any, tokens: Any, chosen: Any, config: Any) -> Any:
        if (chosen.topk_ids >= 0).all():
            return forward(layer, tokens, chosen, config)
        if config.activation != "silu":
            raise NotImplementedError(f"experts with {config.activation} have no stand-in")
        return _own_experts(layer, tokens, chosen.topk_ids, chosen.topk_weights)

    module.moe_forward_native = wrapped


def _own_experts(layer: Any, tokens: Any, ids: Any, weights: Any) -> Any:
    """What this rank's experts add to each token; the other ranks' is added by SGLang."""
    total = tokens.new_zeros(tokens.shape)
    for expert in ids[ids >= 0].unique().tolist():
        rows, picks = (ids == expert).nonzero(as_tuple=True)
        gate, up = linear(tokens[rows], layer.w13_weight[expert]).chunk(2, dim=-1)
        added = linear(silu(gate) * up, layer.w2_weight[expert])
        total.index_add_(0, rows, added * weights[rows, picks].unsqueeze(-1).to(added.dtype))
    return total
