# SPDX-License-Identifier: Apache-2.0
"""Which releases of SGLang this release of the package runs with (docs/compatibility.md)."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["NEWEST_TESTED", "OLDEST", "too_old", "untested"]

#: Older ones lack what the hand-over needs: `KVArgs.kv_layout`, for one.
OLDEST: Final = (0, 5, 23)
#: The newest release with which the demo has run.
NEWEST_TESTED: Final = (0, 5, 23)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def too_old(version: str) -> str | None:
    """Why this release cannot work, in a sentence; None if it may.

    A build without a release number (`0.0.0.dev0`) is not known to be too old.
    """
    numbers = _numbers(version)
    if numbers is None or numbers >= OLDEST:
        return None
    return (
        f"SGLang {version} is installed, and this release of sglang-mooncake needs SGLang "
        f"{_text(OLDEST)} or newer: upgrade SGLang"
    )


def untested(version: str) -> str | None:
    """What to expect of a release that no test has run with, in a sentence; None for others."""
    numbers = _numbers(version)
    if numbers is not None and numbers <= NEWEST_TESTED:
        return None
    return (
        f"sglang-mooncake was not tested with the installed SGLang {version}; the newest release "
        f"that was is {_text(NEWEST_TESTED)}. If the server fails, install that one, or look for a "
        "newer release of sglang-mooncake"
    )


def _numbers(version: str) -> tuple[int, ...] | None:
    """Major, minor and patch of a release, or None for a build that has no number."""
    found = _NUMBERS.match(version)
    numbers = tuple(int(one) for one in found.groups()) if found else (0, 0, 0)
    return numbers if any(numbers) else None


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
