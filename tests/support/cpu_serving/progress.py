# SPDX-License-Identifier: Apache-2.0
"""What is going on, on stderr: a spinner with elapsed time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Step", "no_tick"]

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def no_tick(_detail: str) -> None:
    """For callers that show no progress."""


class Step:
    """One named step, as a context manager; call `tick` often while it lasts."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._started = 0.0
        self._ticks = 0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if not self._tty:
            self._line(f"{self._title} ...")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        outcome = "done" if kind is None else "failed"
        self._line(f"{self._title}: {outcome} after {self._elapsed_s():.1f} s")

    def tick(self, detail: str = "") -> None:
        self._ticks += 1
        if self._tty:
            frame = FRAMES[self._ticks % len(FRAMES)]
            note = f"  {detail}" if detail else ""
            self._stream.write(f"\r\033[K{frame} {self._title}  {self._elapsed_s():.0f} s{note}")
            self._stream.flush()

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _line(self, text: str) -> None:
        self._stream.write(f"\r\033[K{text}\n" if self._tty else f"{text}\n")
        self._stream.flush()
