# SPDX-License-Identifier: Apache-2.0
"""Which releases of vLLM the connectors run with (docs/compatibility.md). Pure."""

from __future__ import annotations

import re
from typing import Final

from sglang_mooncake.release_numbers import numbers_of, text_of

__all__ = ["NEWEST_TESTED", "OLDEST", "lacks", "line_of", "too_old", "untested"]

#: Older ones lay their KV caches out by other rules.
OLDEST: Final = (0, 31, 0)
#: The newest release with which servers have run.
NEWEST_TESTED: Final = (0, 33, 0)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def too_old(version: str) -> str | None:
    """Why this release cannot work, in a sentence; None if it may.

    A build without a release number (`0.0.0.dev0`) is not known to be too old.
    """
    numbers = numbers_of(_NUMBERS, version)
    if numbers is None or numbers >= OLDEST:
        return None
    return (
        f"vLLM {version} is installed, and this release of sglang-mooncake runs with"
        f" {text_of(OLDEST)} to {text_of(NEWEST_TESTED)}: install {text_of(OLDEST)}, the nearest"
    )


def untested(version: str) -> str | None:
    """What to expect of a release that no server has run with, in a sentence; None for others."""
    numbers = numbers_of(_NUMBERS, version)
    if numbers is not None and numbers[:2] <= NEWEST_TESTED[:2]:
        return None
    return (
        f"sglang-mooncake was not tested with the installed vLLM {version}; the nearest release"
        f" that was is {text_of(NEWEST_TESTED)}. If the server fails, install that one"
    )


def lacks(version: str, what: object) -> str:
    """The sentence for a release that has not got something that the connectors need."""
    return (
        f"vLLM {version} does not have what this release of sglang-mooncake needs ({what}):"
        f" install vLLM {text_of(NEWEST_TESTED)}, the nearest release that works"
    )


def line_of(version: str) -> str:
    """What must be equal on a prefill and a decode server: vLLM does not say when its kernels begin
    to arrange a block in another way. Patches of a release (`0.32.1`) change no kernel."""
    numbers = numbers_of(_NUMBERS, version)
    return version if numbers is None else text_of(numbers[:2])
