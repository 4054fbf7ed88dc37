# SPDX-License-Identifier: Apache-2.0
"""Which lines of servers' logs are not what they say anyway. Pure."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["NewLines", "kinds", "others"]

_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")
_HEAD_CHARS: Final = 60
"""What comes behind them differs from line to line."""
KINDS_MAX: Final = 12


class NewLines:
    """Of several logs."""

    def __init__(self) -> None:
        self._seen: defaultdict[str, int] = defaultdict(int)

    def of(self, logs: Mapping[str, str]) -> list[str]:
        """Those that have come since the last call, by the logs' texts as they are now."""
        found: list[str] = []
        for name, text in logs.items():
            lines = text.splitlines()
            found += lines[self._seen[name] :]
            self._seen[name] = len(lines)
        return found


def others(ordinary: Iterable[str], lines: Iterable[str]) -> list[str]:
    """The lines that are of no kind of which there is an ordinary one."""
    known = {_head(line) for line in ordinary}
    return [line for line in lines if _head(line) not in known]


def kinds(lines: Iterable[str]) -> list[str]:
    """How many lines there are of each kind, the most frequent first."""
    found = Counter(_head(line) for line in lines)
    return [f"{count} × {head}" for head, count in found.most_common(KINDS_MAX)]


def _head(line: str) -> str:
    return _NUMBER.sub("N", line)[:_HEAD_CHARS].strip()
