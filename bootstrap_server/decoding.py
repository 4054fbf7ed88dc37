# SPDX-License-Identifier: Apache-2.0
"""Text that a stranger has sent: how it is decoded, and how much of it is shown. Pure."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

__all__ = ["BadText", "decoded", "excerpt"]

#: Sentences of our own are shorter: the longest name two values of 120 characters and some hosts.
EXCERPT_CHARS_MAX: Final = 1_000

_T = TypeVar("_T")


class BadText(ValueError):
    """The text is not JSON of the form that is expected, and why."""


def decoded(decoder: msgspec.json.Decoder[_T], text: bytes) -> _T:
    """What `text` says; `BadText` for whatever else it may be.

    Beside its own errors msgspec raises the interpreter's: for text that is not UTF-8, for one that
    is nested too deeply, and for a number that no float holds.
    """
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise BadText(excerpt(str(error))) from error


def excerpt(text: str) -> str:
    """`text` as far as a sentence or a line of the log may quote it: printable, and not too
    long."""
    plain = "".join(char if char.isprintable() else " " for char in text[:EXCERPT_CHARS_MAX])
    return plain if len(text) <= EXCERPT_CHARS_MAX else f"{plain[:-1]}…"
