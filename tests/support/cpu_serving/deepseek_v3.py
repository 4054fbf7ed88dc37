# SPDX-License-Identifier: Apache-2.0
"""A tiny DeepSeek-V3: MLA with a low-rank query, one dense layer, then layers of routed experts in
groups beside a shared one, and one more layer that predicts the next but one token (MTP).

Its head is the embedding, moved on by one token, and its layers add less to a token than other
tiny models' do. So token t is often followed by t + 1, unless the KV cache says otherwise: a draft
can be right, as the one of a trained model is, and a wrong byte still changes tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["ATTENTION_SCALE", "CONFIG", "DRAFT_SCALE", "MLP_SCALE", "weights", "yarn"]

HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4
LAYERS = 3
DENSE_LAYERS = 1
Q_LORA_RANK = 48
KV_LORA_RANK = 32
QK_NOPE_DIM = 16
QK_ROPE_DIM = 16
V_DIM = 16
EXPERTS = 8
EXPERT_INTERMEDIATE = 64
MAX_POSITIONS = 4096
VOCAB_SIZE = 512
#: How much smaller weights are than others: those of what attention and experts add to a token, and
#: of what its draft gets of the last hidden state. Measured: a quarter of all drafts is right, and
#: with half of ATTENTION_SCALE nearly every one, with twice as much nearly none.
ATTENTION_SCALE = 0.16
MLP_SCALE = 0.006
DRAFT_SCALE = 0.2


def yarn(max_positions: int) -> dict[str, Any]:
    """SGLang builds the rotary embedding of DeepSeek's models only from such a description."""
    return {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": max_positions // 2,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_LORA_RANK,
    "kv_lora_rank": KV_LORA_RANK,
    "qk_nope_head_dim": QK_NOPE_DIM,
    "qk_rope_head_dim": QK_ROPE_DIM,
    "v_head_dim": V_DIM,
    "rope_theta": 10000.0,
    "rope_scaling": yarn(MAX_POSITIONS),
    "first_k_dense_replace": DENSE_LAYERS,
    "moe_layer_freq": 1,
    "moe_intermediate_size": EXPERT_INTERMEDIATE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}


def weights() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, as in the published checkpoint."""
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    for layer in range(LAYERS + 1):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield from _attention(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        if layer < DENSE_LAYERS:
            yield from _mlp(f"{prefix}.mlp", INTERMEDIATE)
        else:
            yield from _experts(f"{prefix}.mlp")
    draft = f"model.layers.{LAYERS}"
    yield f"{draft}.enorm.weight", (HIDDEN,)
    yield f"{draft}.hnorm.weight", (HIDDEN,)
    yield f"{draft}.eh_proj.weight", (HIDDEN, 2 * HIDDEN)
    yield f"{draft}.shared_head.norm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN)


def _attention(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.q_a_proj.weight", (Q_LORA_RANK, HIDDEN)
    yield f"{prefix}.q_a_layernorm.weight", (Q_LORA_RANK,)
    yield f"{prefix}.q_b_proj.weight", (HEADS * (QK_NOPE_DIM + QK_ROPE_DIM), Q_LORA_RANK)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (KV_LORA_RANK + QK_ROPE_DIM, HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", (KV_LORA_RANK,)
    yield f"{prefix}.kv_b_proj.weight", (HEADS * (QK_NOPE_DIM + V_DIM), KV_LORA_RANK)
    yield f"{prefix}.o_proj.weight", (HIDDEN, HEADS * V_DIM)


def _mlp(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, HIDDEN)
    yield f"{prefix}.up_proj.weight", (width, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, width)


def _experts(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate.weight", (EXPERTS, HIDDEN)
    yield f"{prefix}.gate.e_score_correction_bias", (EXPERTS,)
    yield from _mlp(f"{prefix}.shared_experts", EXPERT_INTERMEDIATE)
    for expert in range(EXPERTS):
        yield from _mlp(f"{prefix}.experts.{expert}", EXPERT_INTERMEDIATE)
