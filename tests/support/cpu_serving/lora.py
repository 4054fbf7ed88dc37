# SPDX-License-Identifier: Apache-2.0
"""Tiny LoRA adapters of the tiny models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cpu_serving.architectures import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

__all__ = ["LORA_FLAGS", "write_adapter"]

#: Of a server that has adapters: of SGLang's backends this one alone needs no GPU.
LORA_FLAGS = ("--enable-lora", "--lora-backend", "torch_native")
RANK = 8
#: Large enough that keys and values are others, and so the tokens.
SCALE = 0.3
ROWS = {
    "q_proj": HEADS * HEAD_DIM,
    "k_proj": KV_HEADS * HEAD_DIM,
    "v_proj": KV_HEADS * HEAD_DIM,
}


def write_adapter(folder: Path, seed: int) -> None:
    """Writes an adapter of the model `llama` there, over what is there. Other seeds give other
    weights, in files of the same names and sizes: as of one that was trained again."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(ROWS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng([seed, 9])
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for layer in range(LAYERS):
        for name, rows in ROWS.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (RANK, HIDDEN)), ("lora_B", (rows, RANK))):
                values = rng.standard_normal(shape) * SCALE
                tensors[f"{prefix}.{part}.weight"] = values.astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
