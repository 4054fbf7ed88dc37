# SPDX-License-Identifier: Apache-2.0
"""Addresses of a port (GIDs), what kind each is, and in which order a pair of peers tries them.

The order is a guess: routes, overlays and firewalls are not in these tables. Whoever connects
probes pair after pair with the peer itself and keeps the first that carries a byte.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from te.topology.machine import Nic

__all__ = ["Gid", "GidKind", "gid_pairs", "is_overlay", "parse_gid", "read_gids"]

# Interfaces of container networks: their addresses often mean something on this host alone.
_OVERLAYS: Final = (
    "br-",
    "cali",
    "cilium",
    "cni",
    "docker",
    "flannel",
    "kube-",
    "tunl",
    "virbr",
    "vxlan",
    "weave",
)


def is_overlay(netdev: str) -> bool:
    """Whether an interface belongs to a container network, by its name."""
    return netdev.startswith(_OVERLAYS)


class GidKind(enum.StrEnum):
    """What a GID is made of."""

    #: RoCE: an IPv4 address of the interface, ::ffff:a.b.c.d.
    IPV4 = "IPv4"
    #: RoCE: a routable IPv6 address.
    IPV6 = "IPv6"
    #: fe80::…: within one network.
    LINK_LOCAL = "link-local"
    #: InfiniBand: subnet prefix and port GUID.
    INFINIBAND = "InfiniBand"
    #: iWARP: the interface's hardware address; connections go by IP address.
    HARDWARE = "hardware"


class Gid(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a port's table of addresses."""

    #: Its place in the table.
    index: int
    #: The address, such as ``fe80::1`` or ``::ffff:10.77.0.1``.
    text: str
    #: What it is made of.
    kind: GidKind
    #: Version of RoCE, 1 or 2; 0 otherwise.
    roce: int
    #: The network interface that it belongs to, if any.
    netdev: str

    @property
    def raw(self) -> bytes:
        """16 bytes, as ``union ibv_gid`` has them."""
        return ipaddress.IPv6Address(self.text).packed

    @property
    def is_overlay(self) -> bool:
        """Whether it belongs to a container network, by the name of its interface."""
        return is_overlay(self.netdev)


def parse_gid(index: int, text: str, type_text: str, netdev: str, nic: Nic) -> Gid | None:
    """From the kernel's texts; None for an empty entry.

    ``type_text`` is ``RoCE v2`` or ``IB/RoCE v1``, as in ``gid_attrs/types``.
    """
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return None
    if int(address) == 0:
        return None
    is_roce = nic.kind == "CA" and nic.link_layer == "Ethernet"
    if nic.kind == "RNIC":
        kind = GidKind.HARDWARE
    elif not is_roce:
        kind = GidKind.INFINIBAND
    elif address.ipv4_mapped is not None:
        kind = GidKind.IPV4
    else:
        kind = GidKind.LINK_LOCAL if address.is_link_local else GidKind.IPV6
    shown = str(address) if address.ipv4_mapped is None else f"::ffff:{address.ipv4_mapped}"
    roce = (2 if "v2" in type_text else 1) if is_roce else 0
    return Gid(index=index, text=shown, kind=kind, roce=roce, netdev=netdev)


def read_gids(nic: Nic, root: Path = Path("/")) -> tuple[Gid, ...]:
    """The table of a port, by index, from sysfs below ``root``; without empty entries."""
    port = root / "sys/class/infiniband" / nic.device / "ports" / str(nic.port)
    indices = sorted(int(path.name) for path in (port / "gids").glob("[0-9]*"))
    found = []
    for index in indices:
        text = _text(port / "gids" / str(index))
        if parse_gid(index, text, "", "", nic) is None:
            continue  # Most of up to 1024 are empty, and reading takes longer than all else here.
        kind = _text(port / "gid_attrs/types" / str(index))
        netdev = _text(port / "gid_attrs/ndevs" / str(index))
        gid = parse_gid(index, text, kind, netdev, nic)
        if gid is not None:
            found.append(gid)
    return tuple(found)


def gid_pairs(local: Sequence[Gid], remote: Sequence[Gid]) -> tuple[tuple[Gid, Gid], ...]:
    """Pairs that can speak with each other, the likeliest first.

    Both ends need one protocol (RoCE v2 before v1; InfiniBand; iWARP) and one family of addresses
    (IPv4, then IPv6, then link-local). Container networks come last in each.
    """
    pairs = [
        (one, other)
        for one in local
        for other in remote
        if (one.roce, one.kind) == (other.roce, other.kind)
    ]
    return tuple(sorted(pairs, key=_likelihood))


def _likelihood(pair: tuple[Gid, Gid]) -> tuple[int, ...]:
    one, other = pair
    return (
        -one.roce,
        one.is_overlay + other.is_overlay,
        list(GidKind).index(one.kind),
        -_common_bits(one.raw, other.raw),
        one.index,
        other.index,
    )


def _common_bits(one: bytes, other: bytes) -> int:
    """Leading bits alike: more of them for two addresses of one subnet."""
    return 128 - (int.from_bytes(one) ^ int.from_bytes(other)).bit_length()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""  # the kernel answers EINVAL for the attributes of an empty entry
