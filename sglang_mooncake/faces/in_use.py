# SPDX-License-Identifier: Apache-2.0
"""What a call of others' APIs raises instead of telling an ordinary failure."""

from __future__ import annotations

__all__ = ["MemoryInUse"]


class MemoryInUse(Exception):
    """te may still use the caller's memory. No number says that: whoever is told of an ordinary
    failure uses the memory again."""
