# SPDX-License-Identifier: Apache-2.0
"""Kinds of memory: what can touch it directly, how it is copied, how other processes map it.

``base`` is the contract. A new kind is a module here whose recogniser stands in ``RECOGNISERS``.
"""

from __future__ import annotations

from typing import Final

from te.memory_kinds.base import Export, MemoryKind, Reach, Recogniser
from te.memory_kinds.cuda import recognise_cuda
from te.memory_kinds.host import HOST

__all__ = ["HOST", "RECOGNISERS", "Export", "MemoryKind", "Reach", "Recogniser", "kind_of"]

RECOGNISERS: Final[list[Recogniser]] = [recognise_cuda]
"""Asked in this order; what nobody knows is host memory."""


def kind_of(address: int) -> MemoryKind:
    """The kind of the memory at an address; where there is none it is ``HOST``, whose
    ``check`` says so."""
    for recognise in RECOGNISERS:
        kind = recognise(address)
        if kind is not None:
            return kind
    return HOST
