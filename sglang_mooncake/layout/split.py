# SPDX-License-Identifier: Apache-2.0
"""How a serving engine splits the caches of one rank, beside what TP and pipeline stages say."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_mooncake.layout.description import ALL, Dealt

__all__ = ["UNSPLIT", "Split"]


@dataclass(frozen=True, slots=True)
class Split:
    """How SGLang splits the KV cache of a rank beside TP and pipeline stages.

    pages_dealt, tokens_dealt: see `Layout`.
    whole_heads: every TP rank has all KV heads; TP deals out the state alone (CP-TP group sharing).
    on_host: the model's KV pages lie in host memory, and what is on the device has other numbers
        (HiSparse).
    """

    pages_dealt: Dealt = ALL
    tokens_dealt: Dealt = ALL
    whole_heads: bool = False
    on_host: bool = False


UNSPLIT = Split()
