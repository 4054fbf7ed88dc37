# SPDX-License-Identifier: Apache-2.0
"""The command ``te``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from te.arguments import BAD_USAGE, Parser
from te.checkout import of_checkout
from te.doctor import command as doctor
from te.errors import TopologyError, UsageError
from te.top import command as top
from te.topology import report as topology
from te.version import version

__all__ = ["main"]


def _parser(bench: Any) -> argparse.ArgumentParser:
    parser = Parser(prog="te", description="Inspect and measure the transfer engine.")
    parser.add_argument("--version", action="version", version=f"te {version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    bench_parser = commands.add_parser(
        "bench",
        help="measure te beside other engines and beside plain memory copies on this machine"
        + (" (not part of the wheel)" if bench is None else ""),
    )
    if bench is not None:
        bench.add_arguments(bench_parser)
        bench_parser.set_defaults(run=bench.run)
    doctor_parser = commands.add_parser(
        "doctor",
        help="check the transports of this machine, and say how to mend what is wrong",
        description=doctor.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_arguments(doctor_parser)
    top_parser = commands.add_parser(
        "top",
        help="show the live rails of all engines of this user",
        description=top.DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_arguments(top_parser)
    top_parser.set_defaults(run=top.run)
    topology_parser = commands.add_parser(
        "topology", help="RDMA devices, their addresses, and which memory locations use them"
    )
    topology.add_arguments(topology_parser)
    topology_parser.set_defaults(run=topology.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of the command."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    bench = of_checkout("te_bench.command")
    if words[:1] == ["bench"] and bench is None:
        sys.stderr.write("te bench is not part of the wheel: use a checkout (pip install -e .)\n")
        return BAD_USAGE
    parser = _parser(bench)
    if not words:  # What it can do.
        parser.print_help()
        return 0
    parsed = parser.parse_args(words)
    bad_usage: int = getattr(parsed, "bad_usage", BAD_USAGE)
    try:
        status: int = parsed.run(parsed)
    except (UsageError, TopologyError) as error:
        sys.stderr.write(f"te {parsed.command}: {error}\n")
        return bad_usage
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
