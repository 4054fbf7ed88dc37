# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's modes the hand-over serves. What would fail at a request, or give wrong bytes,
is refused when a server starts, and by `sglang-mooncake plan`, with the same sentence."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_mooncake.context import PREFILL_COMPLETE, Role

__all__ = ["Modes", "refusal"]

_WITHOUT = "sglang-mooncake does not serve {} yet: start the server without it"
_POLICY = f"--disaggregation-decode-allocation-policy {PREFILL_COMPLETE}"


@dataclass(frozen=True, slots=True)
class Modes:
    """One server, as far as it matters here; the defaults are SGLang's.

    states: kinds of state that the model keeps beside its KV pages (SGLang's names).
    has_draft: it runs a draft model, whose caches are handed over, too.
    is_compressed: DeepSeek-V4's pools.
    """

    role: Role
    decode_allocation_policy: str = "early"
    dcp_size: int = 1
    kv_cache_sharding: bool = False
    cp_tp_group_sharing: bool = False
    hisparse: bool = False
    staging_buffer: bool = False
    has_draft: bool = False
    is_compressed: bool = False
    states: tuple[str, ...] = ()


def refusal(modes: Modes) -> str | None:
    """Why this server cannot take part, and what to change; None if it can."""
    # Then pages of two pools, on the host and on the device, are named for one request.
    hisparse = modes.hisparse and modes.role == "decode"
    refused = {
        "CP-TP group sharing (--enable-prefill-cp with this model)": modes.cp_tp_group_sharing,
        "--dcp-size above 1": modes.dcp_size > 1,
        "--enable-kv-cache-sharding": modes.kv_cache_sharding,
        "--enable-hisparse with a draft model": hisparse and modes.has_draft,
        "--enable-hisparse with DeepSeek-V4": hisparse and modes.is_compressed,
        "SGLANG_DISAGG_STAGING_BUFFER": modes.staging_buffer,
    }
    for what, given in refused.items():
        if given:
            return _WITHOUT.format(what)
    return _prefill_complete(modes)


def _prefill_complete(modes: Modes) -> str | None:
    """As SGLang's own backend: state that changes from request to request does not wait with the
    pages of a prompt until decode has room for it."""
    others = sorted(set(modes.states) - {"dsa"})
    if modes.decode_allocation_policy == PREFILL_COMPLETE and others:
        return (
            f"{_POLICY} is for full attention and DSA alone, and this model keeps "
            f"{' and '.join(others)} state beside its KV cache: start both servers without it"
        )
    return None
