# SPDX-License-Identifier: Apache-2.0
"""How processes of one host map each other's CUDA memory.

Memory of ``cuMemAlloc``, as PyTorch's caching allocator has by default, is exported as the block
that it lies in, by a handle of 64 bytes (CUDA's IPC). Virtual memory, as PyTorch's expandable
segments are, is exported as the pieces that it is made of, each by a descriptor: the message names
its number, and the other process takes a copy of it. Memory that was made without either, such as
that of PyTorch's memory saver, cannot be exported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec

from te.memory_kinds.base import Exported, Mapped, TakeDescriptor
from te.memory_kinds.cuda._copier import Copier

__all__ = ["block", "can_export_pieces", "map_exported", "pieces"]

_PIECES_MAX = 100
"""Pieces in one message, which then has 900 bytes. PyTorch's pieces have 20 MiB."""
_HANDLE_BYTES = 64
_NBYTES_MAX = 1 << 40

_Size = Annotated[int, msgspec.Meta(ge=1, le=_NBYTES_MAX)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=_NBYTES_MAX)]


class _Block(msgspec.Struct, frozen=True, array_like=True, tag="block"):
    """A block of ``cuMemAlloc``, and where the part begins in it."""

    handle: Annotated[bytes, msgspec.Meta(min_length=_HANDLE_BYTES, max_length=_HANDLE_BYTES)]
    offset: _Offset


class _Pieces(msgspec.Struct, frozen=True, array_like=True, tag="pieces"):
    """Pieces of virtual memory side by side: the exporting process's descriptors, their sizes in
    bytes, and where the part begins in the first."""

    fds: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]],
        msgspec.Meta(min_length=1, max_length=_PIECES_MAX),
    ]
    sizes: Annotated[list[_Size], msgspec.Meta(min_length=1, max_length=_PIECES_MAX)]
    offset: _Offset


_Handle: TypeAlias = _Block | _Pieces
_decoder = msgspec.msgpack.Decoder(_Handle)
_encode = msgspec.msgpack.encode


def block(copier: Copier, address: int, nbytes: int) -> Exported:
    """A range that lies in one block; ``OSError`` if it does not."""
    handle, base, block_nbytes = copier.block(address)
    if address + nbytes > base + block_nbytes:
        raise OSError(f"{nbytes} bytes at {address:#x} are not one block of cuMemAlloc")
    return Exported(address, nbytes, handle=_encode(_Block(handle, address - base)))


def can_export_pieces(copier: Copier, address: int) -> bool:
    """Whether the address is virtual memory that was made to be exported."""
    try:
        fd, _, _ = copier.piece(address)
    except OSError:
        return False
    os.close(fd)
    return True


def pieces(copier: Copier, address: int, nbytes: int) -> Iterator[Exported]:
    """A range of virtual memory; ``OSError``."""
    at, end = address, address + nbytes
    while at < end:
        fds: list[int] = []
        sizes: list[int] = []
        start = at
        try:
            while at < end and len(fds) < _PIECES_MAX:
                fd, base, size = copier.piece(at)
                fds.append(fd)
                sizes.append(size)
                at = base + size
            offset = start - (at - sum(sizes))
            handle = _encode(_Pieces(fds, sizes, offset))
            yield Exported(start, min(at, end) - start, handle=handle)
        finally:
            for fd in fds:
                os.close(fd)


def map_exported(copier: Copier, handle: bytes, nbytes: int, take: TakeDescriptor) -> Mapped:
    """What another process has exported; ``ValueError`` for what is no handle of so many bytes,
    ``OSError``."""
    try:
        said = _decoder.decode(handle)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"a handle of CUDA memory that is none: {exc}") from exc
    if isinstance(said, _Block):
        base, number, total = copier.open_block(said.handle, said.offset + nbytes)
        return Mapped(base + said.offset, number, total)
    total, end = sum(said.sizes), said.offset + nbytes
    # Each piece has some of the range: else a message of a few bytes could take any number of
    # addresses.
    if len(said.sizes) != len(said.fds) or not (
        said.offset < said.sizes[0] and total - said.sizes[-1] < end <= total
    ):
        raise ValueError(f"{len(said.fds)} pieces of {total} bytes for {nbytes} bytes")
    taken: list[int] = []
    try:
        taken.extend(take(fd) for fd in said.fds)
        base, number = copier.map_pieces(taken, said.sizes)
    finally:
        for fd in taken:
            os.close(fd)
    return Mapped(base + said.offset, number, total)
