# SPDX-License-Identifier: Apache-2.0
"""``te doctor``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from msgspec import structs

from te.arguments import address, whole
from te.config import GID_INDEX_AUTOMATIC, LIMITS, TRANSPORTS
from te.doctor.facts import Facts, gather
from te.doctor.findings import BAD_USAGE, Finding, by_severity, judge
from te.doctor.keys import read_keys
from te.doctor.listen import Listener
from te.doctor.messages import Host
from te.doctor.near import child, dial, loop_back, matrix
from te.doctor.outcome import Cell, see_cells, see_hosts, without_mixed_mtus
from te.doctor.report import Report
from te.doctor.rules import findings, possible, usable_ports
from te.doctor.service import LOOPBACK, describe
from te.doctor.startup import only_nics
from te.errors import UsageError
from te.proof import NO_KEY

__all__ = ["DESCRIPTION", "add_arguments", "run"]

DESCRIPTION = """\
Looks at this machine and says which transports are possible, what is wrong, what that costs and
which command mends it. Then it writes 4 MiB to a second process over each transport and each RDMA
device, and compares the bytes. docs/doctor.md lists everything that can be found, by name.

Between two hosts:
  there:  te doctor --listen 0.0.0.0:7650 --secret-file FILE
  here:   te doctor --peer THERE:7650 --secret-file FILE
prints one report for both hosts, with the latency and the rate of each pair of RDMA devices.

exit status:
  0  nothing above a hint
  1  a warning: a transport works, but slower, or not with every device or peer
  2  an error: a transport that was asked for, or for which the hardware is there, cannot work
  3  bad arguments, or the check itself could not be made
"""

LISTEN_S: Final = 600
LISTEN_S_MAX: Final = 86_400
DIAL_TIMEOUT_S: Final = 10.0


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
        help="use this entry of each port's GID table, as an engine that is told to (default, and"
        " for -1: probe all entries)",
    )
    parser.add_argument("--quick", action="store_true", help="make no test writes")
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="look at proc/, sys/ and dev/ below this directory, a copy of another machine's; makes"
        " no test writes (default: /)",
    )
    two = parser.add_mutually_exclusive_group()
    two.add_argument(
        "--peer",
        type=address,
        metavar="HOST:PORT",
        help="check the ways to the host on which te doctor --listen runs",
    )
    two.add_argument(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        help="be the other side of a check; port 0 takes a free one",
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="the deployment's secret, for --peer and --listen: both prove that they have it"
        " (default: whoever reaches the port is served)",
    )
    parser.add_argument(
        "--listen-s",
        type=whole(1, LISTEN_S_MAX),
        default=LISTEN_S,
        metavar="SECONDS",
        help=f"stop listening after so long (default: {LISTEN_S})",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status, as ``DESCRIPTION`` says; ``te.TopologyError`` for devices that are not
    there, ``te.UsageError`` when the check cannot be made."""
    # What engines log of a fault is in the findings.
    logging.getLogger("te").addHandler(logging.NullHandler())
    transports = TRANSPORTS if arguments.transport is None else (arguments.transport,)
    asked = () if arguments.transport is None else transports

    def look(address: str) -> Host:
        """This host as it is now."""
        facts = _facts(arguments)
        found = _of(transports, findings(facts, asked, arguments.gid_index))
        return describe(facts, found, arguments.gid_index, address)

    here = look(LOOPBACK)
    if arguments.listen is not None:
        return _listen(arguments, look)
    if arguments.peer is not None:
        report = _with_peer(arguments, here, transports, asked)
    else:
        report = _alone(arguments, here, transports, asked)
    sys.stdout.write(report.json() if arguments.json else report.text())
    return report.exit_status


def _facts(arguments: argparse.Namespace) -> Facts:
    facts = gather(arguments.root)
    return only_nics(facts, [one for one in arguments.nics.split(",") if one])


def _of(transports: Iterable[str], found: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(one for one in found if one.transport in (*transports, ""))


def _alone(
    arguments: argparse.Namespace,
    here: Host,
    transports: tuple[str, ...],
    asked: tuple[str, ...],
) -> Report:
    found = here.findings
    if arguments.quick or arguments.root != Path("/"):
        return Report(here=here, transports=transports, findings=found)
    ways = [name for name in transports if possible(name, found)]
    ports = usable_ports(here.facts, here.gid_index)
    with child(here.gid_index) as side:
        cells = tuple(loop_back(side, ways, ports, _progress))
    return Report(
        here=here,
        transports=transports,
        findings=by_severity((*found, *judge(see_cells(cells), asked))),
        loop_back=cells,
    )


def _with_peer(
    arguments: argparse.Namespace,
    here: Host,
    transports: tuple[str, ...],
    asked: tuple[str, ...],
) -> Report:
    if arguments.root != Path("/"):
        raise UsageError("--peer looks at this machine: --root cannot be given beside it")
    keys = read_keys(arguments.secret_file)
    with dial(arguments.peer, keys, here.gid_index, DIAL_TIMEOUT_S) as side:
        there = side.look()
        names = here.name, there.name if there.name != here.name else f"{there.name} (peer)"
        far = (structs.replace(one, host=names[1]) for one in _of(transports, there.findings))
        seen = list(see_hosts(here, there, names))
        cells: tuple[Cell, ...] = ()
        if here.protocol == there.protocol:
            cells = tuple(matrix(side, here, there, names, transports, _progress))
    between = judge((*seen, *see_cells(cells)), asked)
    found = without_mixed_mtus((*here.findings, *far))
    return Report(
        here=here,
        transports=transports,
        findings=by_severity((*found, *_of(transports, between))),
        there=there,
        names=names,
        matrix=cells,
    )


def _listen(arguments: argparse.Namespace, look: Callable[[str], Host]) -> int:
    if arguments.root != Path("/"):
        raise UsageError("--listen tests this machine: --root cannot be given beside it")
    keys = read_keys(arguments.secret_file)
    host, port = arguments.listen
    listener = Listener(host, port, keys)
    if keys == (NO_KEY,):
        sys.stderr.write(
            "te doctor: without --secret-file whoever reaches this port can read this report and"
            " make test writes to this process\n"
        )
    sys.stdout.write(
        f"listening on {host} port {listener.port} for {arguments.listen_s} s; on the other host:"
        f" te doctor --peer HOST:{listener.port}\n"
    )
    sys.stdout.flush()

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    listener.run(look, arguments.listen_s, say)
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"te doctor: {text}\n")


def _gid_index(text: str) -> int | None:
    if text == str(GID_INDEX_AUTOMATIC):
        return None
    return whole(0, LIMITS["gid_index"][1])(text)
