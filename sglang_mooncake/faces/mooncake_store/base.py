# SPDX-License-Identifier: Apache-2.0
"""How calls of Mooncake's store class end: a number or nothing, and the reason in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, TypeVar

import te
from sglang_mooncake.faces.mooncake_store.arena import NoRoom
from sglang_mooncake.faces.mooncake_store.codes import INVALID, TRANSFER_FAILED
from sglang_mooncake.faces.mooncake_store.impl import StoreImpl
from sglang_mooncake.faces.mooncake_store.objects import Memory
from sglang_mooncake.faces.mooncake_store.options import Options

__all__ = ["Base", "memories", "outcome"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_REFUSED: Final = (te.Error, ValueError, RuntimeError, OSError, OverflowError, NoRoom)


class Base:
    """Before ``setup`` and after ``close`` every call fails; Mooncake's ends the process."""

    options: ClassVar[Options]

    def __init__(self) -> None:
        self._impl: StoreImpl | None = None

    def _ready(self) -> StoreImpl:
        impl = self._impl
        if impl is None:
            raise ValueError("the store was not set up, or was closed")
        return impl


def outcome(what: str, work: Callable[[], Result], failed: Callable[[int], Result]) -> Result:
    """What ``work`` returns. ``failed`` makes the result of a call that has none of Mooncake's
    number: -800 if bytes did not stop in time, else -600."""
    try:
        return work()
    except _REFUSED as exc:
        # As text: a log that keeps exceptions would keep the store.
        logger.error("mooncake.store over kvstore: %s failed: %s", what, str(exc))
        return failed(TRANSFER_FAILED if isinstance(exc, te.FenceTimeout) else INVALID)


def memories(
    keys: Sequence[str], buffers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
) -> list[Memory]:
    """One for each key. ``ValueError`` if the lists differ in length, a key is empty, or an object
    has no bytes."""
    if not len(keys) == len(buffers) == len(sizes):
        raise ValueError(
            f"{len(keys)} keys, buffers for {len(buffers)} and sizes for {len(sizes)} objects"
        )
    if not all(keys):
        raise ValueError("a key must not be empty")
    return [Memory.of(*one) for one in zip(buffers, sizes, strict=True)]
