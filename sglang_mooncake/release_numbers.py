# SPDX-License-Identifier: Apache-2.0
"""The numbers of a release of an engine, such as SGLang or vLLM. Pure."""

from __future__ import annotations

import re

__all__ = ["numbers_of", "text_of"]


def numbers_of(pattern: re.Pattern[str], version: str) -> tuple[int, ...] | None:
    """Major, minor and patch of a release, or None for a build that has no number (`0.0.0.dev0`).

    Args:
        pattern: its groups are the numbers; one that may be missing counts as 0.
    """
    found = pattern.match(version)
    numbers = tuple(int(one or 0) for one in found.groups()) if found else ()
    return numbers if any(numbers) else None


def text_of(numbers: tuple[int, ...]) -> str:
    """As releases are written."""
    return ".".join(map(str, numbers))
