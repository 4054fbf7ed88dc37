# SPDX-License-Identifier: Apache-2.0
"""The command ``te``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from te.bench import command as bench

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """One sentence on an error, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="te", description="Looks at and measures the transfer engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    bench_parser = commands.add_parser(
        "bench",
        help="te beside its peers and beside the least a copy can cost, on this machine",
    )
    bench.add_arguments(bench_parser)
    bench_parser.set_defaults(run=bench.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
    except bench.UsageError as error:
        sys.stderr.write(f"te {parsed.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
