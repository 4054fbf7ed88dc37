# SPDX-License-Identifier: Apache-2.0
"""Text of others, made fit for a terminal and for a drawing. Pure."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """In one line, with ``?`` for each control character: these could command a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
