# SPDX-License-Identifier: Apache-2.0
"""Which servers of SGLang the store refuses: what it cannot tell apart, it does not store. Pure."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["check_served", "check_told_by_files"]

#: Flags by which pages lie elsewhere than the store looks for them, or by which their values follow
#: from more than files and flags; and what they must be.
SERVED: Final[dict[str, Any]] = {
    "speculative_algorithm": None,
    "dcp_size": 1,
    "dwdp_size": 1,
    "elastic_ep_backend": None,
    "enable_kv_cache_sharding": False,
    "enable_dsa_cache_layer_split": False,
    "enable_hisparse": False,
    "enable_unified_memory": False,
    "enable_page_major_kv_layout": False,
    "quantize_and_serve": False,
    "modelopt_quant": None,
    "modelopt_checkpoint_restore_path": None,
    "rl_quant_profile": None,
    "decrypted_config_file": None,
    "startup_weight_load_mode": "serial",
    "weight_cache_mode": "off",
    "forward_hooks": None,
}
#: Load formats that read safetensors files and change nothing.
LOAD_FORMATS: Final = ("auto", "safetensors")
#: Quantisations whose values follow from the files and the flag.
QUANTIZATIONS: Final = (
    None,
    "awq",
    "awq_marlin",
    "blockwise_int8",
    "compressed-tensors",
    "fp8",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "modelopt_fp8",
    "mxfp4",
    "w8a8_fp8",
    "w8a8_int8",
)


def check_served(server_args: Any) -> None:
    """``ValueError`` for a server whose pages the store could not hold or tell apart."""
    for name, served in SERVED.items():
        given = getattr(server_args, name)
        if given != served:
            raise ValueError(
                f"the store does not serve {_flag(name)} {given}: nobody has tried both, and a page"
                " could be taken for another one; leave it out, or leave the store out"
            )


def check_told_by_files(server_args: Any) -> None:
    """``ValueError`` for a server whose weights are not those in safetensors files."""
    for name, known in (("load_format", LOAD_FORMATS), ("quantization", QUANTIZATIONS)):
        given = getattr(server_args, name)
        text = None if given is None else str(getattr(given, "value", given)).lower()
        if text not in known:
            accepted = ", ".join(str(one) for one in known if one)
            raise ValueError(
                f"{_flag(name)} {text} is none of those of which the store knows that the files"
                f" tell the weights ({accepted})"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
