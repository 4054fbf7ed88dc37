# SPDX-License-Identifier: Apache-2.0
"""What a child of fork(2) has of its parent: sockets, locks, memory, and none of its threads."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Final, Protocol

__all__ = ["Origin", "let_go_in_child"]


logger = logging.getLogger(__name__)


class Origin:
    """The process that something was made in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """False in a child, also in one of a fork in C, which ``let_go_in_child`` does not hear."""
        return os.getpid() == self._pid


class LetsGo(Protocol):
    """Has what a child must not keep."""

    def let_go(self) -> None:
        """In the child: closes its part. Other threads may have had all locks."""


_KNOWN: Final[weakref.WeakSet[LetsGo]] = weakref.WeakSet()


def let_go_in_child(one: LetsGo) -> None:
    """Has ``let_go`` called in children, as long as somebody else refers to it."""
    _KNOWN.add(one)


def _let_go() -> None:
    failed = []
    for one in list(_KNOWN):
        try:
            one.let_go()
        except Exception as exc:  # noqa: BLE001 - the others must be let go, too
            failed.append((one, exc))
    for one, error in failed:
        logger.error("a child of fork keeps a part of %r of its parent", one, exc_info=error)


os.register_at_fork(after_in_child=_let_go)
