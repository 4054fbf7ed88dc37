# SPDX-License-Identifier: Apache-2.0
"""How scripts that are written in Python read their arguments. Standard library alone: ``--help``
and a wrong argument are answered before anything is set up."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NoReturn, TypeVar

__all__ = ["Parser", "count", "made", "natural", "positive", "some_of"]

_Name = TypeVar("_Name", bound=str)
_Options = TypeVar("_Options")


class Parser(argparse.ArgumentParser):
    """A wrong argument is answered with one sentence and exit status 2.

    prog: how the script is called, such as ``.venv/bin/python scripts/wire_doc.py``.
    """

    def __init__(self, prog: str, description: str, **settings: Any) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, **settings)
        self._name = prog.rpartition("/")[2].split()[0]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self._name}: {message} (--help lists the options)\n")


def made(kind: type[_Options], args: argparse.Namespace, **more: Any) -> _Options:
    """The options of a script, a dataclass: each field is the argument of its name, or one of
    ``more``."""
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names - more.keys()}, **more)


def positive(text: str) -> float:
    """An argument's type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def count(text: str) -> int:
    """An argument's type."""
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def natural(text: str) -> int:
    """An argument's type."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def some_of(names: Collection[_Name]) -> Callable[[str], tuple[_Name, ...]]:
    """An argument's type: some of these, with commas between them, in the order of ``names``."""

    def read(text: str) -> tuple[_Name, ...]:
        asked = text.split(",")
        unknown = sorted(set(asked) - set(names))
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(names)}")
        return tuple(name for name in names if name in asked)

    return read
