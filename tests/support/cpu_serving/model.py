# SPDX-License-Identifier: Apache-2.0
"""Tiny random-weight models with a byte-level tokenizer, made on the spot, the same everywhere.

Weights come from a seeded numpy generator and the files are written by hand, so making a model
takes milliseconds and imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cpu_serving import deepseek_v3
from cpu_serving.architectures import (
    ARCHITECTURES,
    COMMON,
    FIRST_PLAIN_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    QK_NOPE_DIM,
    V_DIM,
    VOCAB_SIZE,
    LlamaSize,
)

__all__ = [
    "ARCHITECTURES",
    "FIRST_PLAIN_TOKEN",
    "MODELS_DIR",
    "VOCAB_SIZE",
    "LlamaSize",
    "Weights",
    "make_llama",
    "make_model",
]

MODELS_DIR = Path(sys.prefix) / "cpu-serving" / "models"  # in the .venv, and gone with it
# Large enough that attention is sharp: a wrong byte in the KV cache changes the tokens.
WEIGHT_SCALE = 0.3
FORMAT = 1  # raise when the written files change, so that cached models are made again

Weights = Iterator[tuple[str, tuple[int, ...]]]


def make_model(arch: str, cache_dir: Path = MODELS_DIR, *, seed: int = 0) -> Path:
    """The directory of the tiny model `arch` under `cache_dir`; written if it is not there."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"no tiny model {arch!r}; there are {', '.join(ARCHITECTURES)}")
    config = COMMON | ARCHITECTURES[arch]
    shapes = deepseek_v3.weights() if arch == "deepseek-v3" else _weights(arch)
    return _make(f"{arch}-seed{seed}-v{FORMAT}", cache_dir, arch, config, shapes, seed)


def make_llama(size: LlamaSize, cache_dir: Path = MODELS_DIR, *, seed: int = 0) -> Path:
    """The directory of a Llama of that size under `cache_dir`; written if it is not there."""
    config = COMMON | ARCHITECTURES["llama"]
    config |= {
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": size.positions,
    }
    name = f"{size.name}-seed{seed}-v{FORMAT}"
    return _make(name, cache_dir, "llama", config, _llama_weights(size), seed)


def _make(
    name: str, cache_dir: Path, arch: str, config: dict[str, Any], shapes: Weights, seed: int
) -> Path:
    target = cache_dir / name
    if target.is_dir():
        return target
    cache_dir.mkdir(parents=True, exist_ok=True)
    # A half-written model must never be found: write beside the target, then rename.
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache_dir))
    try:
        _write(scratch, arch, config, shapes, seed)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write(out: Path, arch: str, config: dict[str, Any], shapes: Weights, seed: int) -> None:
    (out / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(seed)
    tensors = {name: _tensor(rng, name, shape) for name, shape in shapes}
    if arch == "deepseek-v3":
        _settle(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(out, config["max_position_embeddings"])


def _settle(tensors: dict[str, npt.NDArray[np.float32]]) -> None:
    """Gives random weights the proportions that `deepseek_v3` describes."""
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = np.roll(embedding, 1, axis=0)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            tensor *= deepseek_v3.ATTENTION_SCALE
        elif name.endswith("down_proj.weight"):
            tensor *= deepseek_v3.MLP_SCALE
        elif name.endswith("eh_proj.weight"):
            tensor *= deepseek_v3.DRAFT_SCALE
            tensor[:, :HIDDEN] = np.eye(HIDDEN) * np.std(embedding)


def _tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    return (rng.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32)


def _weights(arch: str) -> Weights:
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN)
    attention = _mla_attention if "kv_lora_rank" in ARCHITECTURES[arch] else _mha_attention
    for layer in range(ARCHITECTURES[arch].get("num_hidden_layers", LAYERS)):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield from attention(f"{prefix}.self_attn", arch)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN)


def _mha_attention(prefix: str, arch: str) -> Weights:
    yield f"{prefix}.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)
    kv_heads = ARCHITECTURES[arch]["num_key_value_heads"]
    yield f"{prefix}.k_proj.weight", (kv_heads * HEAD_DIM, HIDDEN)
    yield f"{prefix}.v_proj.weight", (kv_heads * HEAD_DIM, HIDDEN)
    yield f"{prefix}.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
    if arch in ("qwen3", "mellum"):
        yield f"{prefix}.q_norm.weight", (HEAD_DIM,)
        yield f"{prefix}.k_norm.weight", (HEAD_DIM,)


def _llama_weights(size: LlamaSize) -> Weights:
    width = size.heads * size.head_dim
    yield "model.embed_tokens.weight", (VOCAB_SIZE, size.hidden)
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (size.hidden,)
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{prefix}.self_attn.{name}.weight", (width, size.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (size.hidden, width)
        yield f"{prefix}.post_attention_layernorm.weight", (size.hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (size.intermediate, size.hidden)
        yield f"{prefix}.mlp.up_proj.weight", (size.intermediate, size.hidden)
        yield f"{prefix}.mlp.down_proj.weight", (size.hidden, size.intermediate)
    yield "model.norm.weight", (size.hidden,)
    yield "lm_head.weight", (VOCAB_SIZE, size.hidden)


def _mla_attention(prefix: str, arch: str) -> Weights:
    latent, rope = (ARCHITECTURES[arch][name] for name in ("kv_lora_rank", "qk_rope_head_dim"))
    yield f"{prefix}.q_proj.weight", (HEADS * (QK_NOPE_DIM + rope), HIDDEN)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (latent + rope, HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", (latent,)
    yield f"{prefix}.kv_b_proj.weight", (HEADS * (QK_NOPE_DIM + V_DIM), latent)
    yield f"{prefix}.o_proj.weight", (HIDDEN, HEADS * V_DIM)


def _write_tokenizer(out: Path, positions: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["pages of keys and values move from one server to the other"], trainer
    )
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "model_max_length": positions,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
