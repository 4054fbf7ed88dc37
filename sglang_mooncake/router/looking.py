# SPDX-License-Identifier: Apache-2.0
"""From a request to the names by which its cache is looked up. Pure."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from sglang_mooncake.router.pages import TEXT_PAGE_BYTES, own_names, seed_of, text_names
from sglang_mooncake.router.placement import Look, Ranks
from sglang_mooncake.router.prompts import cached_max, prompt_of
from sglang_mooncake.router.sglang_http import Body, given, member, rank_of

__all__ = ["PAGE_TOKENS", "Looker", "Tokens"]

PAGE_TOKENS: Final = 16
"""Tokens of a page of the router's own memory."""
#: Until servers have told: what English text has with most tokenizers.
FIRST_TOKENS_PER_BYTE: Final = 0.25
_FADE: Final = 0.98
#: What keeps the cache of a request apart from those of others with the same prompt, or is part of
#: the prompt without being text.
_PRIVATE: Final = ("extra_key", "lora_path", "image_data", "video_data", "audio_data")


class Tokens(Protocol):
    """The model's tokenizer and chat template (``tokenizing.TextTokens``)."""

    def of(self, body: Body, path: str, text: str) -> tuple[int, ...] | None:
        """Of a request whose prompt has this text; None where they are not known."""


class Looker:
    """Names prompts. How many tokens a text has it guesses, by what servers have told of others."""

    def __init__(self, tokens: Tokens | None = None) -> None:
        """``tokens``: of texts, where the model's tokenizer is known."""
        self._tokens, self._bytes = FIRST_TOKENS_PER_BYTE, 1.0
        self._tokens_of = tokens

    @property
    def takes_time(self) -> bool:
        """Whether ``look`` makes tokens of text, which others notice where it is not short. It may
        be called in another thread."""
        return self._tokens_of is not None

    def look(self, body: Body, path: str) -> Look:
        """Of a batch its first prompt; without names where there is none to be read."""
        prompt = prompt_of(body, path)
        ranks = Ranks(rank_of(body, "prefill"), rank_of(body, "decode"))
        if prompt is None:
            return Look((), PAGE_TOKENS, 0.0, ranks=ranks)
        private = b"".join(
            name.encode() + member(body, name) for name in _PRIVATE if given(body, name)
        )
        model = member(body, "model")
        if b":" in model:  # An adapter's name is behind the model's.
            private += model
        salt = member(body, "cache_salt")
        seed = seed_of(_text_in(salt), private) if salt or private else b""
        most = cached_max(body, path)
        if isinstance(prompt, str) and self._tokens_of is not None:
            prompt = self._tokens_of.of(body, path, prompt) or prompt
        if isinstance(prompt, str):
            per_byte = self._tokens / self._bytes
            size = len(prompt.encode(errors="surrogatepass"))
            names = text_names(prompt, seed)
            page_tokens = TEXT_PAGE_BYTES * per_byte
            tokens = size * per_byte
            return Look(names, page_tokens, tokens, text_bytes=size, cached_max=most, ranks=ranks)
        names = own_names(prompt, PAGE_TOKENS, seed)
        told = None if private else prompt
        return Look(
            names, PAGE_TOKENS, len(prompt), prompt=told, seed=seed, cached_max=most, ranks=ranks
        )

    def learn(self, look: Look, prompt_tokens: int) -> None:
        """A prompt has so many tokens."""
        if look.text_bytes:
            self._tokens = self._tokens * _FADE + prompt_tokens
            self._bytes = self._bytes * _FADE + look.text_bytes


def _text_in(raw: bytes) -> str | None:
    """A JSON string; None of what is none."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None
