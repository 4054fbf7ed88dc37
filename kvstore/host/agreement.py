# SPDX-License-Identifier: Apache-2.0
"""What the processes of a host want of the owner that they share, what they must agree on, and what
is said where they do not. Pure."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from kvstore.config import Config

__all__ = ["WISHES", "differences", "of_bytes", "pool", "refusal", "to_bytes", "wished", "wishes"]

WISHES: Final = (
    "memory",
    "chunk_bytes",
    "file",
    "disk",
    "disk_size",
    "objects",
    "objects_size",
    "policy",
    "free_low",
    "free_high",
    "claim_timeout_s",
    "linger_s",
)
"""Settings of the owner alone: those of the process that has started it count for all."""
_LABEL: Final = b"kvstore pool"


def wishes(config: Config) -> dict[str, Any]:
    """How a process would have the owner, for a message."""
    found = {name: getattr(config, name) for name in WISHES}
    return {name: str(one) if isinstance(one, Path) else one for name, one in found.items()}


def wished(config: Config, was: Mapping[str, Any]) -> Config:
    """The settings of a process, with those of the owner as somebody else has them. What
    ``wishes`` has not made raises ``ValueError``."""
    known = {name: value for name, value in was.items() if name in WISHES}
    return replace(config, **known)


def differences(mine: Mapping[str, Any], has: Mapping[str, Any]) -> str:
    """What an owner has otherwise than a process wants it, as a part of a sentence; empty if all is
    the same, or the process wants no memory."""
    if not mine.get("memory"):
        return ""
    other = [name for name in WISHES if mine.get(name) != has.get(name)]
    if has.get("linger_s") == math.inf:  # An operator's is nothing to wonder about.
        other = [name for name in other if name != "linger_s"]
    return ", ".join(f"{name}={has.get(name)!r} instead of {mine.get(name)!r}" for name in other)


def pool(config: Config) -> list[str]:
    """Which pool a process belongs to: its index, and the secrets of which one is enough."""
    names = [hashlib.sha256(config.index.encode()).hexdigest()[:16]]
    return names + [hmac.digest(key, _LABEL, "sha256")[:8].hex() for key in config.keys.data]


def refusal(mine: Sequence[str], theirs: Sequence[str]) -> str:
    """Why two pools (``pool``) are not one; empty if they are."""
    if list(mine[:1]) != list(theirs[:1]):
        return "it meets others at another index, or at none"
    if (mine[1:] or theirs[1:]) and not set(mine[1:]) & set(theirs[1:]):
        return "it has another secret"
    return ""


def to_bytes(config: Config) -> bytes:
    """Settings, for a process that is started. They have the keys that are made of the secret."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def of_bytes(raw: bytes) -> Config:
    """Of ``to_bytes``."""
    return msgspec.msgpack.decode(raw, type=Config, dec_hook=_path)


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(f"{kind} is no kind of a setting")
