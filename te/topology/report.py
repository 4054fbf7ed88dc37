# SPDX-License-Identifier: Apache-2.0
"""``te topology``: devices, addresses, and the order of NICs for each memory location."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from te.errors import TopologyError
from te.topology.choice import choose_topology
from te.topology.gids import Gid, read_gids
from te.topology.locality import Topology
from te.topology.machine import NUMA_UNKNOWN, Machine, read_machine

__all__ = ["add_arguments", "describe", "run", "table", "tables"]

NO_DEVICES = (
    "No RDMA devices: /sys/class/infiniband is empty here. `te doctor` says what is missing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument(
        "--nics",
        default="",
        metavar="PATTERNS",
        help="devices to use, separated by commas: mlx5_*,!mlx5_1 (default: all)",
    )
    parser.add_argument(
        "--override",
        type=Path,
        metavar="FILE",
        help='a topology to use instead of the one found: {"cuda:0": [["mlx5_0"], ["mlx5_1"]]}',
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="read sys/ below this directory, a copy from another machine (default: /)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The exit status: 1 when there is no device."""
    machine = read_machine(arguments.root)
    if arguments.override is not None and arguments.nics:
        raise TopologyError("--override is complete: --nics cannot be given beside it")
    patterns = [pattern for pattern in arguments.nics.split(",") if pattern]
    topology = choose_topology(machine, patterns, arguments.override)
    gids = {nic.name: read_gids(nic, arguments.root) for nic in topology.nics}
    if arguments.json:
        text = msgspec.json.encode(describe(machine, topology, gids))
        sys.stdout.write(msgspec.json.format(text.decode()) + "\n")
    else:
        sys.stdout.write(tables(topology, gids))
    return 0 if topology.nics else 1


def describe(
    machine: Machine, topology: Topology, gids: Mapping[str, Sequence[Gid]]
) -> dict[str, Any]:
    """What the tables show, for programs; localities in the form that ``--override`` reads."""
    return {
        "nics": topology.nics,
        "gpus": machine.gpus,
        "nodes": machine.nodes,
        "gids": gids,
        "localities": topology.localities,
    }


def tables(topology: Topology, gids: Mapping[str, Sequence[Gid]]) -> str:
    """The tables for people."""
    if not topology.nics:
        return NO_DEVICES + "\n"
    devices = [
        (
            nic.name,
            nic.state,
            nic.link_layer if nic.kind == "CA" else "iWARP",
            f"{nic.rate_gbps:g} Gbit/s",
            "?" if nic.numa == NUMA_UNKNOWN else str(nic.numa),
            nic.pci[-1] if nic.pci else "-",
            nic.netdev or "-",
            nic.uverbs or "not usable",
        )
        for nic in topology.nics
    ]
    addresses = [
        (name, str(gid.index), gid.text, gid.kind.value, f"v{gid.roce}" if gid.roce else "-")
        for name, table in gids.items()
        for gid in table
    ]
    places = {place: address for address, place in topology.gpus.items()}
    order = [
        (place, places.get(place, "-"), _names(row.preferred), _names(row.other))
        for place, row in topology.localities.items()
    ]
    return "\n".join(
        (
            table(("NIC", "port", "link", "rate", "NUMA", "PCI", "interface", "verbs"), devices),
            table(("NIC", "index", "GID", "kind", "RoCE"), addresses),
            table(("memory", "PCI", "first", "then"), order),
        )
    )


def _names(names: Sequence[str]) -> str:
    return " ".join(names) or "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines) + "\n"
