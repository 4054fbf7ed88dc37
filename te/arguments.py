# SPDX-License-Identifier: Apache-2.0
"""How the commands ``te``, ``kvstore`` and ``sglang-mooncake`` take their command lines."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["BAD_USAGE", "Parser"]

BAD_USAGE = 2


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
