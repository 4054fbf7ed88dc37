# SPDX-License-Identifier: Apache-2.0
def ring_limits() -> dict[str, int]:
    """Sizes of rings and of their heads in bytes, by name."""

def ring_layout() -> dict[str, int]:
    """Offsets in the head of a ring, by name."""
