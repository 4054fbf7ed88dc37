# SPDX-License-Identifier: Apache-2.0
"""Methods of SGLang's classes, replaced for as long as a manager lives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["Patches"]


class Patches:
    """SGLang's hook registry applies hooks before a process knows its role, and never takes them
    back. These are applied by the manager of the one role that needs them, and undone with it."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def around(self, owner: type, name: str, hook: Callable[..., Any]) -> None:
        """From now on `owner.name(*args)` is `hook(original, *args)`."""
        original = getattr(owner, name)
        was_own = name in vars(owner)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        def undo() -> None:
            if vars(owner).get(name) is not wrapper:
                return  # somebody has wrapped it since; our hook is passive by now
            if was_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        setattr(owner, name, wrapper)
        self._undo.append(undo)

    def undo(self) -> None:
        """Idempotent."""
        while self._undo:
            self._undo.pop()()
