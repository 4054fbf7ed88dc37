# SPDX-License-Identifier: Apache-2.0
"""What a prefill server of vLLM answers, and its decode server is asked with
(``kv_transfer_params``): where a prompt's KV cache is to be had, and of what it is. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["DECODE_ELSEWHERE", "PREFILLED", "Offer", "prompt_digest"]

#: vLLM's own names: said to the prefill server, and said by it.
DECODE_ELSEWHERE = "do_remote_decode"
PREFILLED = "do_remote_prefill"


@dataclass(frozen=True)
class Offer:
    """A computed prompt that waits for a decode server.

    registry: "host:port" of the prefill instance's registry.
    room: the number of the hand-over.
    tokens: of the prompt.
    prompt: its digest (``prompt_digest``).
    server: what must be equal on both servers, each by the name of what sets it.
    """

    registry: str
    room: int
    tokens: int
    prompt: str
    server: Mapping[str, str]

    def params(self) -> dict[str, Any]:
        """For the answer, which is JSON."""
        return {
            PREFILLED: True,
            DECODE_ELSEWHERE: False,
            "registry": self.registry,
            "room": self.room,
            "tokens": self.tokens,
            "prompt": self.prompt,
            "server": dict(self.server),
        }

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Of a request, which anybody may have made up. ``ValueError`` names what is wrong."""
        kinds = {"registry": str, "room": int, "tokens": int, "prompt": str, "server": dict}
        for name, kind in kinds.items():
            value = params.get(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(
                    f"kv_transfer_params: {name} is {str(value)[:80]!r}, and must be what the"
                    " prefill server has answered"
                )
        if not 0 <= params["room"] < 2**63:
            raise ValueError(f"kv_transfer_params: room {str(params['room'])[:80]} is no room")
        server = {str(name): str(value) for name, value in params["server"].items()}
        return cls(params["registry"], params["room"], params["tokens"], params["prompt"], server)

    def refusal(self, tokens: int, prompt: str, server: Mapping[str, str]) -> str | None:
        """Why a decode server with this prompt cannot take it; None if it can."""
        for name, ours in server.items():
            theirs = self.server.get(name)
            if theirs != ours:
                return (
                    f"{name}: the prefill server has {theirs}, this one has {ours}; start both with"
                    " the same"
                )
        if (self.tokens, self.prompt) != (tokens, prompt):
            return (
                f"the prefill server has computed another prompt, of {self.tokens} tokens where"
                f" this one has {tokens} (digests {self.prompt[:12]} and {prompt[:12]}): both must"
                " be sent the same, and have the same tokenizer and chat template"
            )
        return None


def prompt_digest(
    tokens: Sequence[int], block_tokens: int, hashes: Sequence[bytes], others: Sequence[str]
) -> str:
    """Of all on which a prompt's KV cache depends, beside the server.

    hashes: vLLM's of the request's full blocks, each with all before it; of its first ones at
        least those of the prompt.
    others: what the tokens behind those depend on, too: images, a LoRA.
    """
    whole = len(tokens) // block_tokens
    digest = hashlib.sha256(f"{len(tokens)} ".encode())
    if whole:
        digest.update(hashes[whole - 1])
    rest = [int(one) for one in tokens[whole * block_tokens :]]
    digest.update(repr((rest, list(others))).encode())
    return digest.hexdigest()
