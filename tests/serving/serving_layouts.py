# SPDX-License-Identifier: Apache-2.0
"""The layouts that the tests serve. They take turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpu_serving.expectations import VERIFIED, Layout
from cpu_serving.model import make_model
from cpu_serving.servers import ServerOptions

__all__ = ["LAYOUTS", "Case"]

CHUNK = 128
BY_QUERY = ("--load-balance-method", "round_robin")
DECODE_RADIX = ("--disaggregation-decode-enable-radix-cache",)
FORMS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"tp": 2, "dp_attention": True},
    "dp2 by query": {"tp": 2, "dp_attention": True, "extra_args": BY_QUERY},
}


@dataclass(frozen=True)
class Case:
    """A layout by its features."""

    model: str
    prefill: str
    decode: str
    page_size: int = 1
    chunked: bool = False
    decode_radix: bool = False

    def layout(self) -> Layout:
        """With the model made. All requests are compared by digests, too."""
        path = make_model(self.model)
        both = {
            "page_size": self.page_size,
            "chunked_prefill_size": CHUNK if self.chunked else None,
            "extra_env": VERIFIED,
        }
        decode = FORMS[self.decode]
        if self.decode_radix:
            decode = decode | {"extra_args": (*decode.get("extra_args", ()), *DECODE_RADIX)}
        servers = [ServerOptions(path, **both, **form) for form in (FORMS[self.prefill], decode)]
        return Layout("pair", self.model, *servers)


LAYOUTS = {
    "page16-chunked": Case("llama", "tp1", "tp1", 16, chunked=True),
    "chunked-decode-radix": Case("llama", "tp1", "tp1", chunked=True, decode_radix=True),
    "tp2": Case("llama", "tp2", "tp2"),
    "dp-attention-by-room": Case("qwen3", "dp2", "dp2"),
    "dp-attention-by-query": Case("qwen3", "dp2 by query", "dp2"),
    "mla": Case("deepseek", "tp1", "tp1", 16, chunked=True),
    "mla-tp2": Case("deepseek", "tp2", "tp2"),
    # Heads are sliced, both ways.
    "tp2-tp1-page64": Case("llama", "tp2", "tp1", 64, chunked=True),
    "tp1-tp2-decode-radix": Case("llama", "tp1", "tp2", decode_radix=True),
    # One KV head, which both ranks of the wider server store.
    "replicated-tp2-tp1": Case("llama-mqa", "tp2", "tp1", 16, chunked=True),
    "replicated-tp1-tp2": Case("llama-mqa", "tp1", "tp2"),
    "dp2-tp1": Case("qwen3", "dp2", "tp1", 16),
    "tp2-dp2": Case("qwen3", "tp2", "dp2", chunked=True),
    "pp2-pp1": Case("llama", "pp2", "tp1", 16, chunked=True),
    "pp2-pp2": Case("llama", "pp2", "pp2"),
    # One latent, which one of the two ranks sends while the other is only asked.
    "mla-tp2-tp1-page64": Case("deepseek", "tp2", "tp1", 64, chunked=True),
    "mla-tp1-tp2": Case("deepseek", "tp1", "tp2"),
    # Sliding windows: state beside the KV pages, handed over with the last chunk.
    "windows-tp2-tp1": Case("mellum", "tp2", "tp1", 16, chunked=True),
}
