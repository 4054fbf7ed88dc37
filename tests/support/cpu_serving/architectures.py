# SPDX-License-Identifier: Apache-2.0
"""The configurations of the tiny models. Standard library alone: the demo's command line knows them
before anything is installed."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cpu_serving import deepseek_v3

__all__ = ["ARCHITECTURES", "COMMON", "LlamaSize"]

#: What a request makes, if nobody says how many.
NEW_TOKENS = 8
VOCAB_SIZE = 512
FIRST_PLAIN_TOKEN = 2  # 0 and 1 are <s> and </s>
MAX_POSITIONS = 4096
LAYERS = 3
DEEP = 8
HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
KV_LORA_RANK = 32
QK_NOPE_DIM = 16
QK_ROPE_DIM = 16
V_DIM = 16
WINDOW = 128

#: What an architecture does not say itself.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}

# SGLang reads the mixture-of-experts fields even though every layer here is dense.
_DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": KV_LORA_RANK,
    "qk_nope_head_dim": QK_NOPE_DIM,
    "qk_rope_head_dim": QK_ROPE_DIM,
    "v_head_dim": V_DIM,
    "rope_theta": 10000.0,
    "rope_scaling": deepseek_v3.yarn(MAX_POSITIONS),
    "first_k_dense_replace": LAYERS,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "mlp_bias": False,
    },
    # With several groups of layers.
    "llama-deep": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": DEEP,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "mlp_bias": False,
    },
    # One KV head: with more ranks than heads, ranks store copies of one.
    "llama-mqa": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
        "mlp_bias": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rope_theta": 10000.0,
    },
    # Sliding windows in two layers of three: SGLang keeps their KV in a pool of its own.
    "mellum": {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("sliding_attention", "full_attention")
        },
        "mlp_layer_types": ["dense"] * LAYERS,
        # Read although no layer has experts.
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
    "deepseek": _DEEPSEEK,
    # A latent of the one size that vLLM's kernels for CPUs have.
    "deepseek-wide": _DEEPSEEK | {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek-v3": deepseek_v3.CONFIG,
}


@dataclass(frozen=True)
class LlamaSize:
    """A Llama with as many KV heads as heads: what its prefill computes and what KV it leaves.

    positions: the longest sequence, in tokens.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    head_dim: int
    positions: int

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers in float32."""
        return self.layers * 2 * self.heads * self.head_dim * 4

    @property
    def name(self) -> str:
        """Tells models of different sizes apart."""
        return "llama-" + "-".join(str(value) for value in asdict(self).values())
