# SPDX-License-Identifier: Apache-2.0
"""``te doctor``."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from te.config import LIMITS, TRANSPORTS
from te.doctor.facts import Facts, gather
from te.doctor.findings import BAD_USAGE
from te.doctor.report import Report
from te.doctor.rules import findings
from te.doctor.startup import only_nics

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Looks at this machine and says which transports are possible, what is wrong, what that costs and
which command mends it. docs/doctor.md lists everything that can be found, by name.

exit status:
  0  nothing above a hint
  1  a warning: a transport works, but slower, or not with every device or peer
  2  an error: a transport that was asked for, or for which the hardware is there, cannot work
  3  bad arguments, or the check itself could not be made
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.set_defaults(run=run, bad_usage=BAD_USAGE)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        help="look at this transport alone; whatever stops it is an error",
    )
    parser.add_argument(
        "--nics",
        default="",
        metavar="PATTERNS",
        help="RDMA devices to look at, separated by commas: mlx5_*,!mlx5_1 (default: all)",
    )
    parser.add_argument(
        "--gid-index",
        type=_gid_index,
        metavar="INDEX",
        help="look whether this entry of each port's GID table can be used, as if the engine were"
        " told to (default: te probes all entries)",
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="look at proc/, sys/ and dev/ below this directory, a copy of another machine's"
        " (default: /)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status, as ``DESCRIPTION`` says; ``te.TopologyError`` for devices that are not
    there."""
    transports = TRANSPORTS if arguments.transport is None else (arguments.transport,)
    facts = _facts(arguments)
    asked = () if arguments.transport is None else transports
    found = findings(facts, asked, arguments.gid_index)
    report = Report(
        host=socket.gethostname(),
        transports=transports,
        findings=tuple(one for one in found if one.transport in (*transports, "")),
        facts=facts,
        gid_index=arguments.gid_index,
    )
    sys.stdout.write(report.json() if arguments.json else report.text())
    return report.exit_status


def _facts(arguments: argparse.Namespace) -> Facts:
    facts = gather(arguments.root, ask_devices=arguments.root == Path("/"))
    return only_nics(facts, [one for one in arguments.nics.split(",") if one])


def _gid_index(text: str) -> int:
    least, most = LIMITS["gid_index"]
    if not (text.isdecimal() and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
    return int(text)
