# SPDX-License-Identifier: Apache-2.0
"""Which releases of SGLang this release of the package runs with (docs/compatibility.md), and which
of them have a mode that is not the hand-over itself. What differs between them in the code:
`differences.py`. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import Final

from sglang_mooncake.release_numbers import numbers_of, text_of

__all__ = [
    "MODELLESS_DRAFTS",
    "NEWEST_TESTED",
    "OLDEST",
    "SERVED",
    "Mode",
    "first_lacking",
    "lacking",
    "too_old",
    "untested",
]

#: Those with which the demo has run, rising.
SERVED: Final = ((0, 5, 18), (0, 5, 19), (0, 5, 20), (0, 5, 21), (0, 5, 22), (0, 5, 23))
OLDEST: Final = SERVED[0]
NEWEST_TESTED: Final = SERVED[-1]
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


#: Values of --speculative-algorithm with which no draft model runs.
MODELLESS_DRAFTS: Final = (None, "NGRAM")


class Mode(enum.Enum):
    """What some of the releases do not have. SGLang itself refuses flags that it does not know.

    The value: what it is called, the first release that has it, and what is wrong with older ones.
    """

    DRAFTS = (
        "a draft model (--speculative-algorithm)",
        (0, 5, 20),
        "an older one does not say which caches are the draft model's",
    )
    DEEPSEEK_V4 = (
        "DeepSeek-V4",
        (0, 5, 21),
        "in an older one decode ranks do not know how the model's layers are compressed",
    )
    LAYERWISE = (
        "layer by layer",
        (0, 5, 23),
        "an older one begins loads from HiCache elsewhere",
    )
    LINKER = ("the store's linker", (0, 5, 22), "an older one has no LayerWiseLoadCounter")
    DCP = ("--dcp-size above 1", (0, 5, 23), "nobody has tried it with an older one")
    SHARDING = ("--enable-kv-cache-sharding", (0, 5, 23), "nobody has tried it with an older one")
    GROUP_SHARING = ("CP-TP group sharing", (0, 5, 23), "nobody has tried it with an older one")
    HISPARSE = ("--enable-hisparse", (0, 5, 23), "nobody has tried it with an older one")


def too_old(version: str) -> str | None:
    """Why this release cannot work, in a sentence; None if it may.

    A build without a release number (`0.0.0.dev0`) is not known to be too old.
    """
    numbers = numbers_of(_NUMBERS, version)
    if numbers is None or numbers >= OLDEST:
        return None
    return (
        f"SGLang {version} is installed, and this release of sglang-mooncake works with "
        f"{text_of(OLDEST)} to {text_of(NEWEST_TESTED)}: the nearest to yours is {text_of(OLDEST)}"
    )


def untested(version: str) -> str | None:
    """What to expect of a release that no test has run with, in a sentence; None for others."""
    numbers = numbers_of(_NUMBERS, version)
    if numbers is not None and numbers <= NEWEST_TESTED:
        return None
    return (
        f"sglang-mooncake was not tested with the installed SGLang {version}; the nearest release "
        f"that was is {text_of(NEWEST_TESTED)}. If the server fails, install that one, or look for "
        "a newer release of sglang-mooncake"
    )


def lacking(mode: Mode, version: str) -> str | None:
    """Why this release does not have a mode, in a sentence that names the first one that has it;
    None if it may."""
    what, first, reason = mode.value
    numbers = numbers_of(_NUMBERS, version)
    if numbers is None or numbers >= first:
        return None
    return (
        f"sglang-mooncake serves {what} with SGLang {text_of(first)} or newer, and SGLang "
        f"{version} is installed ({reason}): upgrade SGLang, or do without"
    )


def first_lacking(modes: Collection[Mode], version: str) -> str | None:
    """Of the modes that a server runs in the first one that this release does not have, in the
    sentence of `lacking`; None if it has all of them."""
    said = (lacking(mode, version) for mode in Mode if mode in modes)
    return next((sentence for sentence in said if sentence is not None), None)
