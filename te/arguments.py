# SPDX-License-Identifier: Apache-2.0
"""How the commands ``te``, ``kvstore`` and ``sglang-mooncake`` take their command lines, and the
types of arguments that are numbers and addresses."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

__all__ = ["BAD_USAGE", "Parser", "address", "number", "whole"]

BAD_USAGE = 2
#: Far more than any number that is asked for has.
_DIGITS_MAX: Final = 30


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line with one sentence, without the usage. Of an option or a command
    that is not there it names the nearest one. Exits with ``BAD_USAGE``, or with the default value
    of ``bad_usage`` if the parser has one."""

    def error(self, message: str) -> NoReturn:
        status: int = self.get_default("bad_usage") or BAD_USAGE
        self.exit(status, f"{self.prog}: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's. Looks first for options that are not there: else a misspelt one could be
        taken for the lack of another, and parsers of commands leave it to the one above, which
        knows no options of theirs."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:
            self._check_options(words)
        return super().parse_known_args(words, namespace)

    def _check_options(self, words: Sequence[str]) -> None:
        options = list(self._option_string_actions)
        for word in words:
            if word == "--":
                return
            name = word.partition("=")[0]
            is_option = name.startswith("--") and " " not in name
            if is_option and not any(one.startswith(name) for one in options):
                near = difflib.get_close_matches(name, options, 1)
                hint = f": did you mean {near[0]}?" if near else ""
                self.error(f"there is no option {name}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """With the nearest choice."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
            if near:
                error.message += f": did you mean {near[0]}?"
            raise


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argument's type: a whole number from ``least`` (not negative) to ``most``; None: without
    an upper limit."""
    wanted = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() and len(text) <= _DIGITS_MAX else -1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")
        return value

    return parse


def number(least: float, most: float, unit: str) -> Callable[[str], float]:
    """An argument's type: a number from ``least`` to ``most``, both in ``unit``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number from {least:.10g} to {most:.10g} {unit}"
            )
        return value

    return parse


def address(text: str) -> tuple[str, int]:
    """An argument's type: ``HOST:PORT``, ``[::1]:7650``; an IPv6 address loses its brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or len(port) > _DIGITS_MAX or int(port) > 65_535:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HOST:PORT, such as 0.0.0.0:9401 or 127.0.0.1:9401"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
