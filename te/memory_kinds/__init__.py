# SPDX-License-Identifier: Apache-2.0
"""Kinds of memory: what can touch it directly, how it is copied, how other processes map it.

``base`` is the contract. A new kind is a module here whose recogniser stands in ``_recognisers``;
or, in somebody else's package, one whose recogniser is given to ``add``.
"""

from __future__ import annotations

import threading

from te.memory_kinds.base import Export, MemoryKind, Reach, Recogniser
from te.memory_kinds.cuda import recognise_cuda
from te.memory_kinds.host import HOST

__all__ = ["HOST", "Export", "MemoryKind", "Reach", "Recogniser", "add", "kind_of", "remove"]

_lock = threading.Lock()
# Asked in this order; what nobody knows is host memory. Replaced, never changed.
_recognisers: tuple[Recogniser, ...] = (recognise_cuda,)


def kind_of(address: int) -> MemoryKind:
    """Of which kind the memory at an address is; where there is none it is ``HOST``'s, whose
    ``check`` says so."""
    for recognise in _recognisers:
        kind = recognise(address)
        if kind is not None:
            return kind
    return HOST


def add(recognise: Recogniser) -> None:
    """Makes kinds known, to be asked before all others; regions registered before keep theirs."""
    global _recognisers
    with _lock:
        _recognisers = (recognise, *_recognisers)


def remove(recognise: Recogniser) -> None:
    """Takes back an ``add``; ``ValueError`` without one. Deregister the memory first."""
    global _recognisers
    with _lock:
        if recognise not in _recognisers:
            raise ValueError(f"{recognise!r} was not added")
        _recognisers = tuple(one for one in _recognisers if one != recognise)
