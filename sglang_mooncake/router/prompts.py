# SPDX-License-Identifier: Apache-2.0
"""The prompt of a request, by which its cache is found. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from sglang_mooncake.router.sglang_http import (
    CHAT,
    COMPLETIONS,
    given,
    is_batch,
    member,
    wants_input_logprobs,
)

__all__ = ["Prompt", "cached_max", "prompt_of"]

Prompt: TypeAlias = "str | tuple[int, ...] | None"

_IDS: Final = msgspec.json.Decoder(tuple[int, ...])
_TEXTS_OR_IDS: Final = msgspec.json.Decoder(str | list[str | list[int]])


class _Message(msgspec.Struct):
    role: str = ""
    content: Any = None


def prompt_of(body: Mapping[str, msgspec.Raw], path: str) -> Prompt:
    """The prompt by which its cache is found: its tokens, where the client has given them, or its
    text. Of a batch the first one. None for what is neither (embeddings, images)."""
    if path == CHAT:
        return _chat_text(body)
    for name in ("input_ids", "prompt") if path == COMPLETIONS else ("text", "input_ids"):
        if not given(body, name):
            continue
        tokens = _flat_ids(body, name)
        if tokens is not None:
            return tokens
        return _first_of(body, name)
    return None


def cached_max(body: Mapping[str, msgspec.Raw], path: str) -> int | None:
    """How many tokens of the prompt may come out of a cache at most; None is all. Log-probabilities
    of the prompt are computed with it, from the token on that the client names."""
    if not wants_input_logprobs(body, path):
        return None
    try:
        first = msgspec.json.decode(
            member(body, "logprob_start_len") or b"null", type=int | list[int] | None
        )
    except msgspec.DecodeError:
        return None
    named = [one for one in (first if isinstance(first, list) else [first]) if one is not None]
    return min((one for one in named if one >= 0), default=None)


def _chat_text(body: Mapping[str, msgspec.Raw]) -> str | None:
    """The messages one after another, each behind its role: what the chat template makes of them
    begins alike where this does. Messages with images end it."""
    try:
        messages = msgspec.json.decode(body.get("messages", b"null"), type=list[_Message] | None)
    except msgspec.DecodeError:
        return None
    parts = [bytes(body["tools"]).decode(errors="replace")] if given(body, "tools") else []
    for message in messages or ():
        if not isinstance(message.content, str):
            text = _parts_text(message.content)
            if text is None:
                break
            parts.append(f"{message.role}\n{text}")
            continue
        parts.append(f"{message.role}\n{message.content}")
    return "\n".join(parts) or None


def _parts_text(content: object) -> str | None:
    if not isinstance(content, list):
        return None
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def _first_of(body: Mapping[str, msgspec.Raw], name: str) -> Prompt:
    try:
        value = _TEXTS_OR_IDS.decode(body[name])
    except msgspec.DecodeError:
        return None
    if isinstance(value, str):
        return value
    first = value[0] if value else None
    return tuple(first) if isinstance(first, list) else first


def _flat_ids(body: Mapping[str, msgspec.Raw], name: str) -> tuple[int, ...] | None:
    if not member(body, name).startswith(b"[") or is_batch(body, name):
        return None
    try:
        return _IDS.decode(body[name])
    except msgspec.DecodeError:
        return None
