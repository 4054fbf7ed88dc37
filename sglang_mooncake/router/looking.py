# SPDX-License-Identifier: Apache-2.0
"""From a request to the names by which its cache is looked up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from sglang_mooncake.router.pages import TEXT_PAGE_BYTES, own_names, seed_of, text_names
from sglang_mooncake.router.placement import Look
from sglang_mooncake.router.prompts import cached_max, prompt_of
from sglang_mooncake.router.sglang_http import given, member

__all__ = ["PAGE_TOKENS", "Looker"]

PAGE_TOKENS: Final = 16
"""Tokens of a page of the router's own memory."""
#: Until servers have told: what English text has with most tokenizers.
FIRST_TOKENS_PER_BYTE: Final = 0.25
_FADE: Final = 0.98
#: What keeps the cache of a request apart from those of others with the same prompt, or is part of
#: the prompt without being text.
_PRIVATE: Final = ("extra_key", "lora_path", "image_data", "video_data", "audio_data")


class Looker:
    """Names prompts. How many tokens a text has it guesses, by what servers have told of others."""

    def __init__(self) -> None:
        self._tokens, self._bytes = FIRST_TOKENS_PER_BYTE, 1.0

    def look(self, body: Mapping[str, msgspec.Raw], path: str) -> Look:
        """Of a batch its first prompt; without names where there is none to be read."""
        prompt = prompt_of(body, path)
        if prompt is None:
            return Look((), PAGE_TOKENS, 0.0)
        private = b"".join(
            name.encode() + member(body, name) for name in _PRIVATE if given(body, name)
        )
        model = member(body, "model")
        if b":" in model:  # An adapter's name is behind the model's.
            private += model
        salt = member(body, "cache_salt")
        seed = seed_of(_text_in(salt), private)
        most = cached_max(body, path)
        if isinstance(prompt, str):
            per_byte = self._tokens / self._bytes
            size = len(prompt.encode(errors="surrogatepass"))
            names = text_names(prompt, seed)
            page_tokens = TEXT_PAGE_BYTES * per_byte
            return Look(names, page_tokens, size * per_byte, text_bytes=size, cached_max=most)
        names = own_names(prompt, PAGE_TOKENS, seed)
        told = None if private else prompt
        return Look(names, PAGE_TOKENS, len(prompt), prompt=told, seed=seed, cached_max=most)

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
