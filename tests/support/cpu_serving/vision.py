# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL: the tiny Qwen3 with an encoder of images before it, and images to show it."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from cpu_serving.model import MODELS_DIR, Weights, make_model

__all__ = ["image_url", "make_vision_model"]

NAME: Final = "qwen3-vl-v1"
DEPTH = 3
HIDDEN = 64
INTERMEDIATE = 128
HEADS = 4
PATCH = 16
MERGE = 2
FRAMES = 2
POSITIONS = 64
#: Layers of the encoder whose output goes into the first layers of the language model, too.
DEEPSTACK = (0, 1)
#: Attention that is sharper than that makes all images look alike.
WEIGHT_SCALE = 0.1
MARKS: Final = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
#: The text of all messages, with one image where the content has one.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endfor %}"
)


def make_vision_model(cache_dir: Path = MODELS_DIR) -> Path:
    """The directory of the model under `cache_dir`; written if it is not there."""
    target = cache_dir / NAME
    if target.is_dir():
        return target
    text = make_model("qwen3", cache_dir)
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=cache_dir))
    try:
        _write(scratch, text)
        scratch.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was faster, with the same bytes
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def image_url(seed: int, width: int = 64, height: int = 96) -> str:
    """Coloured noise as a PNG in a `data:` URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _write(out: Path, text: Path) -> None:
    words = json.loads((text / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKS.values()))
    tokenizer.save(str(out / "tokenizer.json"))
    marks = {name: tokenizer.token_to_id(mark) for name, mark in MARKS.items()}
    _write_json(out / "config.json", _config(words) | marks)
    settings = json.loads((text / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Qwen2TokenizerFast", "chat_template": CHAT_TEMPLATE}
    _write_json(out / "tokenizer_config.json", settings)
    for file, kind, name in (
        ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessorFast"),
        ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor"),
    ):
        _write_json(out / file, {kind: name, **_preprocessing()})
    rng = np.random.default_rng(0)
    tensors = {name: _tensor(rng, name, shape) for name, shape in _weights(words["hidden_size"])}
    for name, tensor in load_file(text / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


def _config(words: dict[str, Any]) -> dict[str, Any]:
    half = words["head_dim"] // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        "mrope_interleaved": True,
    }
    skipped = ("architectures", "rope_theta", "rope_scaling")
    text = {key: value for key, value in words.items() if key not in skipped}
    vision = {
        "model_type": "qwen3_vl_vision",
        "depth": DEPTH,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_heads": HEADS,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": words["hidden_size"],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES,
        "num_position_embeddings": POSITIONS,
        "deepstack_visual_indexes": DEEPSTACK,
    }
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "torch_dtype": words["torch_dtype"],
        "tie_word_embeddings": False,
        "text_config": {**text, "model_type": "qwen3_vl_text", "rope_parameters": rope},
        "vision_config": vision,
    }


def _preprocessing() -> dict[str, Any]:
    return {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    if "norm" in name and name.endswith("weight"):
        return np.ones(shape, np.float32)
    return (rng.standard_normal(shape) * WEIGHT_SCALE).astype(np.float32)


def _weights(out_hidden: int) -> Weights:
    """Of the encoder."""
    merged = HIDDEN * MERGE * MERGE
    prefix = "model.visual"
    yield f"{prefix}.patch_embed.proj.weight", (HIDDEN, 3, FRAMES, PATCH, PATCH)
    yield f"{prefix}.patch_embed.proj.bias", (HIDDEN,)
    yield f"{prefix}.pos_embed.weight", (POSITIONS, HIDDEN)
    for block in range(DEPTH):
        yield from _norm(f"{prefix}.blocks.{block}.norm1", HIDDEN)
        yield from _norm(f"{prefix}.blocks.{block}.norm2", HIDDEN)
        yield from _linear(f"{prefix}.blocks.{block}.attn.qkv", HIDDEN, 3 * HIDDEN)
        yield from _linear(f"{prefix}.blocks.{block}.attn.proj", HIDDEN, HIDDEN)
        yield from _linear(f"{prefix}.blocks.{block}.mlp.linear_fc1", HIDDEN, INTERMEDIATE)
        yield from _linear(f"{prefix}.blocks.{block}.mlp.linear_fc2", INTERMEDIATE, HIDDEN)
    mergers = [(f"{prefix}.merger", HIDDEN)]
    mergers += [(f"{prefix}.deepstack_merger_list.{i}", merged) for i in range(len(DEEPSTACK))]
    for merger, normed in mergers:
        yield from _norm(f"{merger}.norm", normed)
        yield from _linear(f"{merger}.linear_fc1", merged, merged)
        yield from _linear(f"{merger}.linear_fc2", merged, out_hidden)


def _linear(prefix: str, inputs: int, outputs: int) -> Weights:
    yield f"{prefix}.weight", (outputs, inputs)
    yield f"{prefix}.bias", (outputs,)


def _norm(prefix: str, size: int) -> Weights:
    yield f"{prefix}.weight", (size,)
    yield f"{prefix}.bias", (size,)
