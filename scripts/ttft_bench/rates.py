# SPDX-License-Identifier: Apache-2.0
"""Rates of the network between the servers, as they are asked for. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["EVEN", "UNLIMITED", "Rate", "parse_rate"]

# Units as tc(8) has them: powers of ten.
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_FIXED = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
MIN_BITS_PER_S = 1e6
MAX_BITS_PER_S = 100e9


@dataclass(frozen=True)
class Rate:
    """bits_per_s: the limit; None without one, or when it follows from the measured prefill."""

    text: str
    bits_per_s: float | None = None


UNLIMITED = Rate("unlimited")
#: For each length of prompt, the rate at which its KV takes as long as its prefill.
EVEN = Rate("1:1")


def parse_rate(text: str) -> Rate:
    """``200mbit``, ``1.5gbit``, ``unlimited`` or ``1:1``. Raises ValueError with a sentence."""
    for named in (UNLIMITED, EVEN):
        if text == named.text:
            return named
    match = _FIXED.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no rate: give 200mbit, 1gbit, unlimited or 1:1")
    bits_per_s = float(match[1]) * _UNITS[match[2]]
    if not MIN_BITS_PER_S <= bits_per_s <= MAX_BITS_PER_S:
        raise ValueError(f"{text!r} is no rate between 1mbit and 100gbit")
    return Rate(text, bits_per_s)
