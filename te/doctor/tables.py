# SPDX-License-Identifier: Apache-2.0
"""Tables of what test writes have shown. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from te.doctor.facts import Facts, Port
from te.doctor.outcome import Cell, Stage
from te.topology import gid_pairs
from te.topology.report import table

__all__ = ["cell_text", "loop_back_table", "matrix_tables", "port_table", "rate_text", "time_text"]


def loop_back_table(cells: Sequence[Cell]) -> list[str]:
    """A line for each way on this host."""
    rows = [(cell.here.name, *cell_text(cell)) for cell in cells]
    return table(("test write over", "latency", "rate"), rows).splitlines()


def matrix_tables(cells: Sequence[Cell]) -> list[str]:
    """A matrix of RDMA devices, a row for each here and a column for each there; a list of
    addresses."""
    lines: list[str] = []
    for transport in dict.fromkeys(cell.transport for cell in cells):
        own = [cell for cell in cells if cell.transport == transport]
        lines += [""] if lines else []
        if transport == "tcp":
            lines += _addresses(own)
            continue
        near = list(dict.fromkeys(cell.here.name for cell in own))
        far = list(dict.fromkeys(cell.there.name for cell in own))
        found = {(cell.here.name, cell.there.name): " ".join(cell_text(cell)) for cell in own}
        rows = [(one, *(found.get((one, other), "-") for other in far)) for one in near]
        title = f"{transport}: {own[0].here.host} (rows) to {own[0].there.host} (columns)"
        lines += [title, *table(("", *far), rows).splitlines()]
    return lines


def _addresses(cells: Sequence[Cell]) -> list[str]:
    """Each address has one way to it."""
    rows = [(cell.here.name, cell.there.name, *cell_text(cell)) for cell in cells]
    here, there = cells[0].here.host, cells[0].there.host
    return [f"tcp: {here} to {there}", *table(("from", "to", "latency", "rate"), rows).splitlines()]


def cell_text(cell: Cell) -> tuple[str, str]:
    """Latency and rate, or what has failed."""
    if cell.stage is Stage.DONE:
        return time_text(cell.latency_s), rate_text(cell.bytes_per_s)
    if cell.stage in (Stage.CONNECT, Stage.SMALL):
        return "none", ""
    return time_text(cell.latency_s), "lost" if cell.stage is Stage.LARGE else "wrong"


def port_table(facts: Facts, gid_index: int | None) -> list[str]:
    """The RDMA devices of a host: what decides about connections."""
    rows = [
        (
            port.nic.name,
            port.nic.state,
            "iWARP" if port.nic.kind == "RNIC" else port.nic.link_layer,
            f"{port.nic.rate_gbps:g} Gbit/s",
            _number(port.netdev_mtu),
            _number(port.active_mtu),
            _gid(port, gid_index),
        )
        for port in facts.ports
    ]
    header = ("device", "port", "link", "rate", "MTU", "RDMA MTU", "GID tried first")
    return table(header, rows).splitlines()


def _gid(port: Port, gid_index: int | None) -> str:
    gids = [gid for gid in port.gids if gid_index is None or gid.index == gid_index or not gid.roce]
    pairs = gid_pairs(gids, gids)
    return f"{pairs[0][0].index} ({pairs[0][0].text})" if pairs else "-"


def _number(value: int | None) -> str:
    return "?" if value is None else str(value)


def time_text(seconds: float | None) -> str:
    """``35 µs``, ``1.2 ms``."""
    if seconds is None:
        return "none"
    micros = seconds * 1e6
    return f"{micros:.0f} µs" if micros < 1000 else f"{micros / 1000:.1f} ms"


def rate_text(bytes_per_s: float | None) -> str:
    """``1.2 GB/s``, ``85 MB/s``."""
    if bytes_per_s is None:
        return "none"
    return (
        f"{bytes_per_s / 1e9:.1f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
    )
