# SPDX-License-Identifier: Apache-2.0
"""How far NICs are from memory, and so which a transfer uses first. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Final

import msgspec

from te.errors import TopologyError
from te.topology.machine import NUMA_UNKNOWN, Gpu, Machine, Nic

__all__ = [
    "ANYWHERE",
    "Link",
    "Locality",
    "Topology",
    "choose_nics",
    "link",
    "parse_override",
    "rank",
]

ANYWHERE: Final = "*"
"""Name for all locations that have no name of their own."""

# Bridges between a device and the upstream port of its switch: the switch's downstream port.
_SWITCH_BRIDGES: Final = 1


class Link(enum.IntEnum):
    """What lies between two PCI devices, in the words of ``nvidia-smi topo``; more is farther."""

    #: One switch at most.
    PIX = 0
    #: Several switches, no host bridge.
    PXB = 1
    #: A host bridge.
    PHB = 2
    #: Two host bridges of one NUMA node, or nothing is known.
    NODE = 3
    #: The way between sockets.
    SYS = 4


class Locality(msgspec.Struct, frozen=True, array_like=True):
    """NICs for one memory location: those it uses first, and those that help out."""

    preferred: tuple[str, ...]
    other: tuple[str, ...] = ()


class Topology(msgspec.Struct, frozen=True):
    """NICs in use, and for each memory location (``cpu:0``, ``cuda:3``, ``*``) their order."""

    nics: tuple[Nic, ...]
    localities: dict[str, Locality]
    #: PCI address of a GPU → its location.
    gpus: dict[str, str]
    #: Names of NICs that are not nearer than another socket, per location.
    far: dict[str, tuple[str, ...]]

    def locality(self, location: str) -> Locality:
        """The NICs of ``location``, else those of ``*``, else all NICs alike."""
        found = self.localities.get(location) or self.localities.get(ANYWHERE)
        return found or Locality(tuple(nic.name for nic in self.nics))

    def distance(self, location: str, nic: str) -> int | None:
        """0 preferred, 1 other, 2 other and beyond another socket; None: not to be used.

        ``slowness`` in ``te/transports/rdma/balance.pxd`` says what that means for rails.
        """
        ranked = self.locality(location)
        if nic in ranked.preferred:
            return 0
        if nic not in ranked.other:
            return None
        return 2 if nic in self.far.get(location, ()) else 1


def link(one: Sequence[str], one_numa: int, other: Sequence[str], other_numa: int) -> Link:
    """Between two devices given by their PCI paths (host bridge first) and NUMA nodes."""
    common = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        common += 1
    if common > 1:
        below = max(len(one), len(other)) - common - 1
        return Link.PIX if below <= _SWITCH_BRIDGES else Link.PXB
    if common == 1:
        return Link.PHB
    return _between_nodes(one_numa, other_numa)


def rank(machine: Machine, nics: Sequence[Nic] | None = None) -> Topology:
    """Ranks ``nics`` (default: all of the machine's) for each GPU and each NUMA node.

    The nearest NICs are preferred: for a GPU by the PCI link, for a node's memory those of the
    node. Everything else helps out.
    """
    chosen = machine.nics if nics is None else tuple(nics)
    links = {f"cuda:{gpu.index}": [_gpu_link(gpu, nic) for nic in chosen] for gpu in machine.gpus}
    for node in machine.nodes:
        links[f"cpu:{node}"] = [_between_nodes(node, nic.numa) for nic in chosen]
    return Topology(
        nics=chosen,
        localities={place: _nearest(chosen, found) for place, found in links.items()},
        gpus={gpu.address: f"cuda:{gpu.index}" for gpu in machine.gpus},
        far={
            place: tuple(
                nic.name for nic, way in zip(chosen, found, strict=True) if way is Link.SYS
            )
            for place, found in links.items()
        },
    )


def choose_nics(nics: Sequence[Nic], patterns: Sequence[str]) -> tuple[Nic, ...]:
    """NICs that match a pattern (``mlx5_*``), without those that match an excluded one (``!…``).

    With no pattern, or only exclusions, all the others. Raises ``TopologyError`` for a pattern
    that matches nothing, and when nothing is left.
    """
    wanted = [pattern for pattern in patterns if not pattern.startswith("!")]
    unwanted = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    names = ", ".join(nic.name for nic in nics) or "none"
    for pattern in wanted:
        if not any(_matches(nic, [pattern]) for nic in nics):
            raise TopologyError(f"no RDMA device matches {pattern!r}; there are: {names}")
    chosen = tuple(
        nic for nic in nics if (not wanted or _matches(nic, wanted)) and not _matches(nic, unwanted)
    )
    if nics and not chosen:
        raise TopologyError(f"{', '.join(patterns)} excludes every RDMA device; there are: {names}")
    return chosen


def parse_override(text: str, machine: Machine) -> Topology:
    """A complete topology as JSON: ``{"cuda:0": [["mlx5_0"], ["mlx5_1"]], "*": [[…], […]]}``.

    Of each location, the NICs to use first and those that help out; others are not used for it.
    Nothing is added to it. (The form of Mooncake's ``MC_CUSTOM_TOPO_JSON``, so that existing files
    work.) Raises ``TopologyError`` for another form, an unknown NIC or location, or a NIC named
    twice in a location.
    """
    try:
        table = msgspec.json.decode(text, type=dict[str, _Row])
    except msgspec.DecodeError as exc:
        raise TopologyError(
            f'the topology is not JSON of the form {{"cuda:0": [[first NICs], [others]]}}: {exc}'
        ) from None
    if not table:
        raise TopologyError(
            "the topology contains no memory location; give at least one, or '*' for all"
        )
    by_name = {nic.name: nic for nic in machine.nics}
    gpus = {gpu.address: f"cuda:{gpu.index}" for gpu in machine.gpus}
    _check_places(table, machine, gpus)
    used: list[str] = []
    localities = {}
    for place, row in table.items():
        preferred, other = row[0], row[1] if len(row) > 1 else ()
        _check_names(place, (*preferred, *other), by_name)
        used += [name for name in (*preferred, *other) if name not in used]
        localities[place] = Locality(tuple(preferred), tuple(other))
    nics = tuple(nic for nic in machine.nics if nic.name in used)
    return Topology(nics=nics, localities=localities, gpus=gpus, far={})


_Row = Annotated[list[tuple[str, ...]], msgspec.Meta(min_length=1, max_length=2)]


def _check_places(table: Mapping[str, object], machine: Machine, gpus: Mapping[str, str]) -> None:
    known = [f"cpu:{node}" for node in machine.nodes] + list(gpus.values()) + [ANYWHERE]
    for place in table:
        if place not in known:
            raise TopologyError(
                f"the topology names the location {place!r}; here are: {', '.join(known)}"
            )


def _check_names(place: str, names: Sequence[str], by_name: Mapping[str, Nic]) -> None:
    if not names:
        raise TopologyError(f"the topology gives {place} no NIC")
    for name in names:
        if name not in by_name:
            raise TopologyError(
                f"the topology gives {place} the NIC {name!r};"
                f" there are: {', '.join(by_name) or 'none'}"
            )
        if names.count(name) > 1:
            raise TopologyError(f"the topology gives {place} the NIC {name!r} twice")


def _matches(nic: Nic, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) for pattern in patterns for name in (nic.name, nic.device)
    )


def _gpu_link(gpu: Gpu, nic: Nic) -> Link:
    return link(gpu.pci, gpu.numa, nic.pci, nic.numa)


def _between_nodes(one: int, other: int) -> Link:
    # What nobody knows is not held against a NIC: small machines say -1 for their only node.
    return Link.NODE if NUMA_UNKNOWN in (one, other) or one == other else Link.SYS


def _nearest(nics: Sequence[Nic], links: Sequence[Link]) -> Locality:
    best = min(links, default=Link.NODE)
    return Locality(
        tuple(nic.name for nic, way in zip(nics, links, strict=True) if way == best),
        tuple(nic.name for nic, way in zip(nics, links, strict=True) if way != best),
    )
