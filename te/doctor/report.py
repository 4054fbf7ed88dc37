# SPDX-License-Identifier: Apache-2.0
"""``te doctor``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from te.config import TRANSPORTS
from te.doctor.facts import Facts, gather
from te.doctor.rules import Finding, findings, possible, usable_nics

__all__ = ["add_arguments", "explain", "run", "text"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "--json", action="store_true", help="print everything that was found as JSON"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="report on this transport only; exit status 1 if it cannot be used",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="look at proc/, sys/ and dev/ below this directory (default: /)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 1 when the transport asked for is not possible here."""
    facts = gather(arguments.root)
    asked = TRANSPORTS if arguments.transport is None else (arguments.transport,)
    found = tuple(one for one in findings(facts) if one.transport in asked)
    if arguments.json:
        body = {
            "transports": {name: possible(name, found) for name in asked},
            "findings": found,
            "facts": facts,
        }
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(body).decode()) + "\n")
    else:
        sys.stdout.write(text(asked, facts, found))
    is_possible = arguments.transport is None or possible(arguments.transport, found)
    return 0 if is_possible else 1


def text(asked: tuple[str, ...], facts: Facts, found: tuple[Finding, ...]) -> str:
    """A line per transport, and below it a line per finding."""
    lines = []
    for name in asked:
        answer = "possible" if possible(name, found) else "not possible"
        if name == "rdma" and possible(name, found):
            answer += f" ({', '.join(usable_nics(facts))})"
        lines.append(f"{name:9} {answer}")
        lines += [f"    {one.text}" for one in found if one.transport == name]
    return "\n".join(lines) + "\n"


def explain(transport: str) -> str:
    """Why the transport is not possible on this machine, in a sentence each; empty if it is."""
    found = findings(gather())
    return "; ".join(one.text for one in found if one.transport == transport and one.blocks)
