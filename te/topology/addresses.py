# SPDX-License-Identifier: Apache-2.0
"""IP addresses of a network interface, in the form of GIDs: iWARP connects by them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path
from typing import Final

from te.topology.gids import Gid, GidKind

__all__ = ["bytes_per_s_of", "parse_inet6", "read_addresses"]

SIOCGIFADDR: Final = 0x8915
# netdevice(7): struct ifreq, 16 bytes of name and then a struct sockaddr_in.
IFREQ: Final = struct.Struct("16s4x4s16x")
SCOPE_GLOBAL: Final = "00"
_INTERFACES: Final = Path("/sys/class/net")


def read_addresses(netdev: str) -> tuple[Gid, ...]:
    """The first IPv4 address and the global IPv6 addresses of this host's interface, numbered from
    0. Empty without any, or without the interface."""
    texts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            asked = IFREQ.pack(netdev.encode(), bytes(4))
            _, raw = IFREQ.unpack(fcntl.ioctl(sock, SIOCGIFADDR, asked))
            texts.append((f"::ffff:{ipaddress.IPv4Address(raw)}", GidKind.IPV4))
        except OSError:
            pass  # it has none
    try:
        table = Path("/proc/net/if_inet6").read_text()
    except OSError:
        table = ""  # a kernel without IPv6
    texts += [(text, GidKind.IPV6) for text in parse_inet6(table, netdev)]
    return tuple(
        Gid(index=i, text=text, kind=kind, roce=0, netdev=netdev)
        for i, (text, kind) in enumerate(texts)
    )


def bytes_per_s_of(address: str, interfaces: Path = _INTERFACES) -> float:
    """The speed of the interface that has a numeric IP address, as its driver tells it
    (sysfs-class-net in the kernel's ABI); 0.0 where none does: on the loopback interface, and many
    virtual ones."""
    text = str(ipaddress.ip_address(address))
    wanted = text if ":" in text else f"::ffff:{text}"
    with contextlib.suppress(OSError, ValueError):
        for path in interfaces.iterdir():
            if any(gid.text == wanted for gid in read_addresses(path.name)):
                return max(int((path / "speed").read_text()), 0) * 1e6 / 8
    return 0.0


def parse_inet6(table: str, netdev: str) -> list[str]:
    """Global addresses of the interface in the text of /proc/net/if_inet6: address, number of the
    interface, length of the prefix, scope, flags, name."""
    rows = [line.split() for line in table.splitlines()]
    return [
        str(ipaddress.IPv6Address(bytes.fromhex(row[0])))
        for row in rows
        if len(row) == 6 and row[3] == SCOPE_GLOBAL and row[5] == netdev
    ]
