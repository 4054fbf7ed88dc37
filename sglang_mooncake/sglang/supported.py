# SPDX-License-Identifier: Apache-2.0
"""Which of SGLang's modes the hand-over serves. What would fail at a request, or give wrong bytes,
is refused when a server starts, and by `sglang-mooncake plan`, with the same sentence."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_mooncake.context import PREFILL_COMPLETE, Role

__all__ = ["Modes", "refusal"]

_WITHOUT = "sglang-mooncake does not serve {} yet: start the server without it"
_GROUP_SHARING = "CP-TP group sharing (--enable-prefill-cp with this model)"
#: State that lies on every rank as it would without the mode, or whose pages are known to be dealt
#: out as those of the KV cache are.
_DCP_STATES = frozenset({"mamba"})
_SHARDED_STATES = frozenset({"dsa"})
_SHARED_STATES = frozenset({"mamba", "qsa_pending", "qsa_compressed", "dsa", "dsa_tail"})
_POLICY = f"--disaggregation-decode-allocation-policy {PREFILL_COMPLETE}"


@dataclass(frozen=True, slots=True)
class Modes:
    """One server, as far as it matters here; the defaults are SGLang's.

    states: kinds of state that the model keeps beside its KV pages (SGLang's names).
    has_draft_heads: it runs a draft model that caches KV heads, not latents.
    """

    role: Role
    decode_allocation_policy: str = "early"
    dcp_size: int = 1
    kv_cache_sharding: bool = False
    cp_tp_group_sharing: bool = False
    staging_buffer: bool = False
    has_draft_heads: bool = False
    states: tuple[str, ...] = ()


def refusal(modes: Modes) -> str | None:
    """Why this server cannot take part, and what to change; None if it can."""
    if modes.staging_buffer:
        return _WITHOUT.format("SGLANG_DISAGG_STAGING_BUFFER")
    for what, given, served in (
        ("--dcp-size above 1", modes.dcp_size > 1, _DCP_STATES),
        ("--enable-kv-cache-sharding", modes.kv_cache_sharding, _SHARDED_STATES),
        (_GROUP_SHARING, modes.cp_tp_group_sharing, _SHARED_STATES),
    ):
        others = sorted(set(modes.states) - served)
        if given and others:
            return _WITHOUT.format(
                f"{what} with a model that keeps {' and '.join(others)} state beside its KV cache"
            )
    if modes.cp_tp_group_sharing and modes.has_draft_heads:
        return _WITHOUT.format(f"{_GROUP_SHARING} and a draft model with KV heads")
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
