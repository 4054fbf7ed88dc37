# SPDX-License-Identifier: Apache-2.0
"""Tags one after the other, where random ones would make states differ that are alike."""

from __future__ import annotations

__all__ = ["CountedTags"]


class CountedTags:
    """Stands for ``te.new_tag``."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self) -> int:
        self._next += 1
        return self._next - 1
