# SPDX-License-Identifier: Apache-2.0
"""The live view, with rich: the lines of ``te.top.lines`` in colour, until q."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from te.top.lines import Kind, crop, lines
from te.top.rates import Sample, rows

__all__ = ["show"]

STYLES: Final = {
    Kind.HEAD: "bold reverse",
    Kind.ENGINE: "bold",
    Kind.LINK: "cyan",
    Kind.RAIL: "",
    Kind.BAD: "red",
    Kind.NOTE: "dim",
}
ENDS: Final = frozenset(b"qQ\x03\x04")


def show(look: Callable[[], Sample], interval_s: float, nobody: str) -> int:
    """Looks every ``interval_s`` until q, Ctrl-C, or the end of the input; the exit status."""
    console = Console()
    before: Sample | None = None
    with Live(console=console, screen=True, auto_refresh=False) as live, _keys() as wants_to_end:
        while True:
            with _uninterrupted():
                after = look()
                live.update(_screen(console, before, after, nobody), refresh=True)
            before = after
            if wants_to_end(interval_s):
                return 0


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C counts when this ends. The interpreter prints and forgets an interrupt that meets it
    in a callback of a weak reference, and the thread pool that asks engines has such callbacks."""
    caught: list[int] = []
    # Not a mask, which other threads would not have.
    kept = signal.signal(signal.SIGINT, lambda number, _frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, kept)
        if caught:
            signal.raise_signal(signal.SIGINT)


def _screen(console: Console, before: Sample | None, after: Sample, nobody: str) -> Text:
    width, height = console.size
    found = rows(before, after)
    text = lines(found, after.problems, width)
    if not found and not after.problems:
        text = [(Kind.NOTE, nobody[:width])]
    text = [*crop(text, height - 1), (Kind.NOTE, "q ends"[:width])]
    screen = Text(no_wrap=True, overflow="crop", end="")
    for i, (kind, line) in enumerate(text):
        padded = line.ljust(width) if kind is Kind.HEAD else line
        screen.append(padded, STYLES[kind])
        screen.append("\n" if i < len(text) - 1 else "")
    return screen


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits for so long; whether a key that ends was pressed meanwhile. Keys count without Enter,
    where the input is a terminal."""
    fd = sys.stdin.fileno()
    if not sys.stdin.isatty():

        def wait(wait_s: float) -> bool:
            time.sleep(wait_s)
            return False

        yield wait
        return

    def pressed(wait_s: float) -> bool:
        deadline_s = time.monotonic() + wait_s
        while select.select([fd], [], [], max(deadline_s - time.monotonic(), 0.0))[0]:
            keys = os.read(fd, 64)
            if not keys or ENDS & frozenset(keys):
                return True
        return False

    kept = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, kept)
