# SPDX-License-Identifier: Apache-2.0
"""What a model keeps of each token: from a name that we know, or from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["KNOWN", "ModelError", "ModelShape", "load_model", "one_model"]

_CONFIG_BYTES_MAX = 16 << 20
#: Members that differ between two copies of one model.
_OF_THE_FILE = {"_name_or_path", "transformers_version"}
_DIFFERENCES_MAX = 4
_DTYPE_NBYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
#: Other names that SGLang's flags have for them.
_ALIASES = {"bf16": "bfloat16", "half": "float16", "float": "float32"}
#: Members of a config.json whose models keep something that is not one entry per token and layer.
_STATEFUL = ("index_topk", "linear_attn_config", "mamba_d_state", "mamba_state_size", "ssm_cfg")


class ModelError(ValueError):
    """No model, or one whose cache a dry run cannot describe; the sentence says which."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """heads: KV heads over all ranks; None for MLA, which keeps one latent per token and layer.
    width: numbers per head and token, of K and of V (or of the latent, and 0)."""

    name: str
    layers: int
    heads: int | None
    width: tuple[int, int]
    dtype: str

    @property
    def dtype_nbytes(self) -> int:
        return _DTYPE_NBYTES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Of all layers and heads."""
        return self.layers * (self.heads or 1) * sum(self.width) * self.dtype_nbytes

    @property
    def text(self) -> str:
        if self.heads is None:
            what = f"one MLA latent of {self.width[0]} numbers"
        else:
            widths = " + ".join(str(width) for width in self.width)
            what = f"{self.heads} KV heads of {widths} numbers"
        return f"{self.name}: {self.layers} layers of {what}, {self.dtype}"

    def with_dtype(self, dtype: str | None) -> ModelShape:
        """The same with another `--dtype` or `--kv-cache-dtype`; None and `auto` leave it."""
        if dtype is None or dtype == "auto":
            return self
        return replace(self, dtype=_checked_dtype(dtype))


#: Widths and layer counts as in these models' published config.json.
KNOWN: dict[str, ModelShape] = {
    "deepseek-v3": ModelShape("deepseek-v3", 61, None, (512 + 64, 0), "bfloat16"),
    "llama-70b": ModelShape("llama-70b", 80, 8, (128, 128), "bfloat16"),
    "qwen3-235b": ModelShape("qwen3-235b", 94, 4, (128, 128), "bfloat16"),
}


def one_model(prefill: str | None, decode: str | None) -> str:
    """The model that both servers have, by what their command lines call it.

    Raises:
        ModelError: they name none, or two that are not known to be one.
    """
    one = prefill or decode
    if one is None:
        raise ModelError("name a model: --model, or --model-path in one of the command lines")
    if prefill is None or decode is None or prefill.rstrip("/") == decode.rstrip("/"):
        return one
    if _is_described(prefill) and _is_described(decode):
        differ = _differences(_read_config(prefill), _read_config(decode))
        if not differ:
            return one
        raise ModelError(
            f"--prefill serves {prefill} and --decode serves {decode}, which are two models: "
            f"{'; '.join(differ)}"
        )
    raise ModelError(
        f"--prefill serves {prefill} and --decode serves {decode}. If these are one model at two "
        "places, say which: --model"
    )


def load_model(model: str) -> ModelShape:
    """A known model by its name, or the one that a config.json (or its directory) describes.

    Raises:
        ModelError: neither, or a cache that is not one entry per token and layer.
    """
    if model in KNOWN:
        return KNOWN[model]
    return _shape(_config_of(model), _read_config(model))


def _config_of(model: str) -> Path:
    path = Path(model)
    return path / "config.json" if path.is_dir() else path


def _is_described(model: str) -> bool:
    return _config_of(model).is_file()


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two config.json say differently, the first few, with both values."""
    names = sorted((one.keys() | other.keys()) - _OF_THE_FILE)
    pairs = [(name, one.get(name), other.get(name)) for name in names]
    return [f"{name} {a!r} against {b!r}" for name, a, b in pairs if a != b][:_DIFFERENCES_MAX]


def _read_config(model: str) -> dict[str, Any]:
    path = _config_of(model)
    try:
        if path.stat().st_size > _CONFIG_BYTES_MAX:
            raise ModelError(f"{path} is larger than any config.json")
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(
            f"{model!r} is neither a model that we know ({', '.join(KNOWN)}) nor a config.json: "
            f"{error.strerror}"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no config.json: it holds no JSON object")
    return config


def _shape(path: Path, config: dict[str, Any]) -> ModelShape:
    config = config.get("text_config") or config  # multimodal models
    _check_plain(path, config)
    layers = _number(path, config, "num_hidden_layers")
    name = str(config.get("model_type") or path.parent.name)
    dtype = _checked_dtype(str(config.get("dtype") or config.get("torch_dtype") or "float32"))
    if dtype == "float32":  # What SGLang makes of it without --dtype (configs/model_config.py).
        dtype = "bfloat16" if name.startswith("gemma") else "float16"
    if config.get("kv_lora_rank"):
        latent = _number(path, config, "kv_lora_rank") + _number(path, config, "qk_rope_head_dim")
        return ModelShape(name, layers, None, (latent, 0), dtype)
    all_heads = _number(path, config, "num_attention_heads")
    heads = _number(path, config, "num_key_value_heads") if "num_key_value_heads" in config else 0
    if config.get("head_dim"):
        width = _number(path, config, "head_dim")
    else:
        width = _number(path, config, "hidden_size") // all_heads
    v_width = _number(path, config, "v_head_dim") if config.get("v_head_dim") else width
    return ModelShape(name, layers, heads or all_heads, (width, v_width), dtype)


def _check_plain(path: Path, config: dict[str, Any]) -> None:
    kinds = {str(kind) for kind in config.get("layer_types") or ()} - {"full_attention"}
    kinds |= {name for name in _STATEFUL if config.get(name)}
    if kinds:
        raise ModelError(
            f"{path} describes a model with {', '.join(sorted(kinds))}: a dry run knows full "
            "attention (MHA, GQA, MLA) alone, whose cache is one entry per token and layer"
        )


def _number(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise ModelError(f"{path}: {name} is {value!r}, not a positive number")
    return value


def _checked_dtype(dtype: str) -> str:
    dtype = _ALIASES.get(dtype, dtype)
    if dtype not in _DTYPE_NBYTES:
        raise ModelError(f"a KV cache of {dtype} is not known here: {', '.join(_DTYPE_NBYTES)}")
    return dtype
