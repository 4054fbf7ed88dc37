# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, and a line per case elsewhere."""

from __future__ import annotations

import shutil
from typing import TextIO

__all__ = ["ProgressBar"]

BAR_COLUMNS = 24


class ProgressBar:
    """Draws over its own line; ``done`` takes it away."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title
        self._terminal = stream.isatty()
        if not self._terminal:
            stream.write(f"te bench: {title}\n")
            stream.flush()

    def __call__(self, part: float, what: str) -> None:
        """``part`` of the work is done; ``what`` is next."""
        if not self._terminal:
            return
        full = round(BAR_COLUMNS * part)
        bar = "█" * full + "░" * (BAR_COLUMNS - full)
        line = f"{bar} {part:4.0%} {self._title}: {what}"
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(f"\r{line[:width].ljust(width)}")
        self._stream.flush()

    def done(self) -> None:
        """Leaves the line empty."""
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{' ' * width}\r")
            self._stream.flush()
