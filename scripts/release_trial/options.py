# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/sglang-releases`. A bad argument is answered with one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from command_line import Parser, positive

__all__ = ["TrialOptions", "parse"]

_RELEASE = re.compile(r"\d+(\.\d+)+[a-z0-9.]*")


@dataclass(frozen=True)
class TrialOptions:
    """releases: empty for the newest that pip finds, pre-releases included.
    chaos_minutes: None for no chaos."""

    releases: tuple[str, ...]
    chaos_minutes: float | None


def parse(argv: Sequence[str]) -> TrialOptions:
    parser = Parser(
        "scripts/sglang-releases",
        "For each release of SGLang, such as 0.5.23 or 0.5.24rc1: what our code uses of SGLang and "
        "the release lacks, or has otherwise than the installed one; the members that it reads of "
        "our objects; the modes that it lacks; and on real servers what docs/compatibility.md "
        "says, and a minute of chaos. Everything but SGLang itself is what scripts/setup serving "
        "has installed. A release takes some six minutes on two quiet cores.",
    )
    add = parser.add_argument
    add("releases", nargs="*", metavar="RELEASE", help="such as 0.5.22")
    add("--pre", action="store_true", help="the newest that pip finds, pre-releases included")
    add("--chaos", type=positive, default=1.0, metavar="M", help="minutes of chaos (1)")
    add("--no-chaos", action="store_true", help="none, as where there is no root")
    args = parser.parse_args(argv)
    for release in args.releases:
        if not _RELEASE.fullmatch(release):
            parser.error(f"{release!r} is no release; name such as 0.5.23")
    if bool(args.releases) == args.pre:
        parser.error("name releases, such as 0.5.22 0.5.23, or give --pre")
    return TrialOptions(tuple(args.releases), None if args.no_chaos else args.chaos)


if __name__ == "__main__":
    parse(sys.argv[1:])
