# SPDX-License-Identifier: Apache-2.0
"""What the owner of a host and its users say to each other; MessagePack."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from kvstore.protocol.messages import decoded

__all__ = ["BYTES_MAX", "Farewell", "Join", "Joined", "Message", "Refused", "decode", "encode"]

BYTES_MAX: Final = 64 << 10

Name = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{32})?$")]
Pid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Join(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """May this process use the owner, as long as the connection stands? Answered by ``Joined`` or
    ``Refused``. With it may come a descriptor of memory that a former owner has left behind."""

    #: ``kvstore.protocol.messages.VERSION``.
    version: int
    #: How this process would have the owner: ``agreement.wishes``.
    wishes: dict[str, Any]
    #: Which pool it belongs to: ``agreement.pool``.
    pool: list[str]
    #: The memory that comes along, and how its owner was; empty if none does.
    memory: Name = ""
    was: dict[str, Any] = {}
    #: It is to be the owner itself, as an operator wants it: ``kvstore serve``. An owner that a
    #: server has started answers with ``Farewell``, and ends.
    takes_over: bool = False


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Yes. With it comes a descriptor of the memory, for reading, if it has one that a next owner
    can take over."""

    pid: Pid
    #: How the owner is: ``agreement.wishes``.
    has: dict[str, Any]
    memory: Name
    #: Whether an operator has started it, and starts it again if it ends.
    is_service: bool


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """No."""

    pid: Pid
    why: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The owner ends because its operator wants it to, and starts the next one; or because somebody
    has come who is to be the owner instead (``agreement.gives_way``)."""

    gives_way: bool = False


Message = Join | Joined | Refused | Farewell

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _ENCODER.encode(message)


def decode(raw: bytes) -> Message:
    """``ValueError`` if it is none."""
    try:
        return decoded(_DECODER, raw)
    except msgspec.DecodeError as exc:
        raise ValueError(f"it cannot be read: {exc}") from exc
