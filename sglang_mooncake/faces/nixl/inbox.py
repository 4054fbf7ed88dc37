# SPDX-License-Identifier: Apache-2.0
"""Notifications that came and were not taken yet, and how they are written on the way. Pure."""

from __future__ import annotations

from typing import Final

from sglang_mooncake.faces.nixl.metadata import NAME_BYTES_MAX
from sglang_mooncake.faces.nixl.names import InvalidParam

__all__ = ["MESSAGE_BYTES_MAX", "bytes_of", "merge", "packed", "unpacked"]

MESSAGE_BYTES_MAX: Final = (1 << 20) - 2048
"""Of one notification, so that it is a note of te's with its sender's name. What vLLM and Dynamo
send has some KB; NIXL itself takes more."""

_LENGTH: Final = 2


def bytes_of(message: str | bytes) -> bytes:
    """Both are taken; bytes come out at the other side. ``nixlInvalidParamError`` if too long."""
    data = message.encode() if isinstance(message, str) else bytes(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise InvalidParam(
            f"a notification of {len(data)} bytes; at most {MESSAGE_BYTES_MAX} may be"
        )
    return data


def packed(sender: str, message: bytes) -> bytes:
    """Who sends it, by the agent's name, before what is said: the receiver may not know the sender
    in any other way."""
    name = sender.encode()
    return len(name).to_bytes(_LENGTH, "big") + name + message


def unpacked(data: bytes) -> tuple[str, bytes]:
    """(sender, message). ``ValueError`` for what `packed` did not make."""
    length = int.from_bytes(data[:_LENGTH], "big")
    body = data[_LENGTH:]
    if not 0 < length <= NAME_BYTES_MAX or len(body) < length:
        raise ValueError(f"a notification of {len(data)} bytes that names no sender")
    return body[:length].decode(), body[length:]


def merge(into: dict[str, list[bytes]], came: list[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """``into`` with what came, in the order in which it did."""
    for sender, message in came:
        into.setdefault(sender, []).append(message)
    return into
