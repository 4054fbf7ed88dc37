# SPDX-License-Identifier: Apache-2.0
"""Which blocks of which request are handed over: the scheduler's part of the connector between
prefill and decode servers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mooncake.vllm.pd_offers import Offer

__all__ = ["GivenUp", "Load", "Loads", "Release", "Send", "send_of"]


@dataclass(frozen=True)
class Send:
    """Prefill: a computed prompt that waits for its decode server.

    blocks: those of the prompt, from its first token on; the last one may be full in part.
    """

    request_id: str
    room: int
    tokens: int
    blocks: list[int]


@dataclass(frozen=True)
class GivenUp:
    """Prefill: a decode server that has not reached this one will never ask for this prompt. It
    may be another prefill server's. See ``given_up.GivenUpWatch``."""

    room: int
    reason: str
    refused: bool


@dataclass(frozen=True)
class Load:
    """Decode: a prompt whose blocks are to be filled by its prefill server.

    first_token: of these blocks; this server holds what is before it.
    refusal: why they are not filled after all; vLLM is told that they were not, and computes them.
    """

    request_id: str
    registry: str
    room: int
    first_token: int
    blocks: list[int]
    refusal: str = ""


@dataclass(frozen=True)
class Release:
    """Decode: a prompt that nobody will ask its prefill server for.

    holds: vLLM keeps its request until it is told that this was said.
    """

    request_id: str
    registry: str
    room: int
    reason: str
    holds: bool


def send_of(
    request_id: str, room: int, tokens: int, blocks: Sequence[int], block_tokens: int
) -> Send:
    """``blocks``: of the request, in which generated tokens may follow the prompt's.

    Raises:
        ValueError: the request has fewer blocks than its prompt.
    """
    count = -(-tokens // block_tokens)
    if len(blocks) < count:
        raise ValueError(
            f"request {request_id}: a prompt of {tokens} tokens has {count} blocks of"
            f" {block_tokens}, and vLLM's scheduler names {len(blocks)}"
        )
    return Send(request_id, room, tokens, list(blocks[:count]))


class Loads:
    """What a decode server's scheduler knows of requests whose prompt was computed elsewhere."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        #: Offers of which no use was made yet.
        self._offers: dict[str, Offer] = {}
        #: Of those, which have not been compared with this server.
        self._new: set[str] = set()
        #: Of those, how many tokens this server holds, as it was last asked.
        self._held: dict[str, int] = {}
        #: The prompts of all requests that have an offer, until they end: registry and room.
        self._prompts: dict[str, tuple[str, int]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def new(self, request_id: str, offer: Offer) -> bool:
        """A request has come, and its prompt is to be had; False if another request has the same
        offer (`n` of vLLM's makes such), which is good for one."""
        prompt = (offer.registry, offer.room)
        if prompt in self._prompts.values():
            return False
        self._offers[request_id], self._prompts[request_id] = offer, prompt
        self._new.add(request_id)
        return True

    def to_compare(self, request_id: str) -> Offer | None:
        """An offer that is to be compared with this server before ``match`` is asked; each is told
        once. A request that has ended before it could be computed needs no comparison."""
        if request_id not in self._new:
            return None
        self._new.remove(request_id)
        return self._offers[request_id]

    def refuse(self, request_id: str, reason: str) -> Release:
        """The offer does not fit: the request is computed here."""
        offer = self._offers.pop(request_id)
        return Release(request_id, offer.registry, offer.room, reason, holds=False)

    def match(self, request_id: str, held_tokens: int) -> int:
        """How many tokens behind the first ``held_tokens``, which are whole blocks, are to be had.
        Each request loads once: what did not come is computed."""
        offer = self._offers.get(request_id)
        if offer is None:
            return 0
        self._held[request_id] = held_tokens
        return max(offer.tokens - held_tokens, 0)

    def given(self, request_id: str, blocks: Sequence[int], tokens: int) -> Load | Release | None:
        """The request has blocks for this many of the tokens that ``match`` has told; None if it
        has made use of its offer before. ``blocks``: all of the request's. A prompt comes whole:
        with room for a part of it, it does not come."""
        offer = self._offers.pop(request_id, None)
        held = self._held.pop(request_id, 0)
        if offer is None:
            return None
        if not tokens:
            reason = "the decode server computes the prompt itself"
            return Release(request_id, offer.registry, offer.room, reason, holds=False)
        first, end = held // self._block_tokens, -(-offer.tokens // self._block_tokens)
        refusal = ""
        if held + tokens != offer.tokens or end > len(blocks):
            refusal = (
                f"{offer.tokens - held} tokens are to be loaded behind {held}, and vLLM's scheduler"
                f" has made room for {tokens}, in {len(blocks)} blocks"
            )
            end = -(-(held + tokens) // self._block_tokens)
        return Load(request_id, offer.registry, offer.room, held, list(blocks[first:end]), refusal)

    def finished(self, request_id: str) -> Release | None:
        """Forgets the request. What is to be said of an offer of which no use was made."""
        self._held.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self._new.discard(request_id)
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return None
        reason = "the decode server's request ended before it was computed"
        return Release(request_id, offer.registry, offer.room, reason, holds=True)
