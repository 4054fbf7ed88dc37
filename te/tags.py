# SPDX-License-Identifier: Apache-2.0
"""Tags: names of expected arrivals. The plane keeps and counts them."""

from __future__ import annotations

__all__ = ["TAG_LIMIT", "check_tag"]

TAG_LIMIT = 1 << 64


def check_tag(value: int) -> None:
    """``ValueError`` unless the value can name an expected arrival."""
    if not 0 < value < TAG_LIMIT:
        raise ValueError(f"tag {value} must be between 1 and 2**64 - 1")
