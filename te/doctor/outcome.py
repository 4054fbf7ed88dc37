# SPDX-License-Identifier: Apache-2.0
"""What test writes mean. Pure. Who makes them: ``near.py``."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from te.doctor.catalogue import CATALOGUE
from te.doctor.facts import Port
from te.doctor.findings import Finding, Seen
from te.doctor.messages import Host
from te.doctor.rules import see_mixed_mtus, usable_ports

__all__ = ["Cell", "End", "Stage", "matching_pairs", "see_cells", "see_hosts", "without_mixed_mtus"]


class End(msgspec.Struct, frozen=True, kw_only=True):
    """One end of a way: an RDMA device, or an address."""

    name: str
    #: ``""`` for the ends of a test on one host.
    host: str = ""
    #: Its IP address, for ping; ``""`` if none is known.
    address: str = ""
    #: Its network interface; ``""`` if none is known.
    netdev: str = ""

    def __str__(self) -> str:
        return f"{self.name} of {self.host}" if self.host else self.name


class Stage(enum.StrEnum):
    """How far a test of a way has come."""

    #: The engines have not connected.
    CONNECT = "connect"
    #: Small writes have failed.
    SMALL = "small"
    #: Large writes have failed.
    LARGE = "large"
    #: The bytes were not those that were written.
    BYTES = "bytes"
    #: All went well.
    DONE = "done"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One way, as it was tried."""

    transport: str
    here: End
    there: End
    stage: Stage
    #: What went wrong, without a full stop; ``""`` if all went well.
    problem: str = ""
    #: Median of acknowledged writes of eight bytes; None if none arrived.
    latency_s: float | None = None
    #: Of large writes; None if none arrived.
    bytes_per_s: float | None = None
    #: A way that te does not use as long as the others work.
    is_spare: bool = False


def matching_pairs(here: Sequence[Port], there: Sequence[Port]) -> list[tuple[Port, Port]]:
    """Ports of both sides that belong to one kind of network, each of here with each of there."""
    return [
        (one, other)
        for one in here
        for other in there
        if (one.nic.kind, one.nic.link_layer) == (other.nic.kind, other.nic.link_layer)
    ]


def see_cells(cells: Iterable[Cell]) -> Iterator[Seen]:
    """What did not go well. A transport is blocked when none of its ways works."""
    by_transport: dict[str, list[Cell]] = {}
    for cell in cells:
        by_transport.setdefault(cell.transport, []).append(cell)
    for own in by_transport.values():
        if _is_cut_off(own):
            yield _seen("peer-unreachable", own[0], blocks=True)
        elif _is_rail_only(own):
            yield _seen("rails-isolated", own[0], blocks=False)
        else:
            works = any(cell.stage is Stage.DONE for cell in own)
            for cell in own:
                if cell.stage is not Stage.DONE:
                    yield _seen(_name(cell), cell, blocks=not works)


def _is_cut_off(cells: Sequence[Cell]) -> bool:
    """No way between two hosts connects, of several."""
    stages = {cell.stage for cell in cells}
    return bool(cells[0].there.host) and len(cells) > 1 and stages == {Stage.CONNECT}


def _is_rail_only(cells: Sequence[Cell]) -> bool:
    """All pairs of devices connect that te prefers, and none of the others."""
    spare = {cell.stage for cell in cells if cell.is_spare}
    preferred = {cell.stage for cell in cells if not cell.is_spare}
    is_rdma = cells[0].transport == "rdma"
    return is_rdma and (spare, preferred) == ({Stage.CONNECT}, {Stage.DONE})


def _name(cell: Cell) -> str:
    if cell.stage is Stage.BYTES:
        return "bytes-wrong"
    if not cell.there.host:
        return "loopback-failed"
    if cell.is_spare and cell.transport == "tcp":
        return "address-unreachable"
    return "large-writes-lost" if cell.stage is Stage.LARGE else "rail-unreachable"


def _seen(name: str, cell: Cell, blocks: bool) -> Seen:
    here, there = cell.here, cell.there
    if name in ("peer-unreachable", "rails-isolated"):
        where: tuple[str, ...] = (here.host, there.host)
    elif there.host:
        where = (_place(here), _place(there))
    else:
        where = (here.name,)
    return Seen(
        kind=CATALOGUE[name],
        transport=cell.transport,
        where=where,
        blocks=blocks,
        values={
            "here": str(here),
            "there": str(there),
            "near": here.host,
            "far": there.host,
            "transport": cell.transport,
            "way": here.name,
            "problem": cell.problem,
            "source": here.address or here.netdev or "SOURCE",
            "target": there.address or "TARGET",
            "netdev": here.netdev or "INTERFACE",
        },
    )


def _place(end: End) -> str:
    return f"{end.name}@{end.host}"


def see_hosts(here: Host, there: Host, names: tuple[str, str]) -> Iterator[Seen]:
    """What differs between the two sides; ``names``: what they are called."""
    if (here.version, here.protocol) != (there.version, there.protocol):
        yield Seen(
            kind=CATALOGUE["versions-differ"],
            blocks=here.protocol != there.protocol,
            where=names,
            values={
                "here": f"{here.version} (protocol {here.protocol})",
                "there": f"{there.version} (protocol {there.protocol})",
                "host": names[1],
                "version": here.version,
            },
        )
    sides = ((names[0], here), (names[1], there))
    ports = [
        (name, [(name, port) for port in usable_ports(host.facts, host.gid_index)])
        for name, host in sides
    ]
    if all(some for _, some in ports):
        yield from see_mixed_mtus([one for _, some in ports for one in some])
        if not matching_pairs([p for _, p in ports[0][1]], [p for _, p in ports[1][1]]):
            kinds = [", ".join(sorted({_kind(p) for _, p in some})) for _, some in ports]
            yield Seen(
                kind=CATALOGUE["networks-differ"],
                blocks=True,
                where=names,
                values={
                    "here": names[0],
                    "there": names[1],
                    "here_kinds": kinds[0],
                    "there_kinds": kinds[1],
                },
            )


def _kind(port: Port) -> str:
    if port.nic.kind == "RNIC":
        return "iWARP"
    return "RoCE" if port.nic.link_layer == "Ethernet" else port.nic.link_layer


def without_mixed_mtus(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """One side's findings without that about MTUs, which ``see_hosts`` has for both sides."""
    return tuple(one for one in found if one.name != "mtu-mixed")
