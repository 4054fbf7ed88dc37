# SPDX-License-Identifier: Apache-2.0
"""The addresses of this host's interfaces, as the kernel lists them in /proc/net."""

from __future__ import annotations

import ipaddress
import re
import socket
from pathlib import Path

__all__ = ["addresses_behind", "local_ipv4", "local_ipv6"]

#: A line "|-- ADDRESS", followed by one that says that it is this host's.
_LOCAL = re.compile(r"\|-- ([0-9.]+)\n\s+/32 host LOCAL")


def addresses_behind(host: str) -> tuple[str, ...]:
    """The addresses at which a server that listens on ``host`` can be reached: those of all
    interfaces for 0.0.0.0, :: and the empty word, which the kernel takes for every address; those
    of a name. Waits for the resolver; a name that has no address has none here."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0] or "0.0.0.0")
    except ValueError:
        return _resolved(host)
    if not address.is_unspecified:
        return (str(address),)
    found = local_ipv4(_read("/proc/net/fib_trie"))
    if address.version == 6:  # IPv4 as well: Linux maps it, unless told otherwise
        found += local_ipv6(_read("/proc/net/if_inet6"))
    return found


def local_ipv4(table: str) -> tuple[str, ...]:
    """In the text of /proc/net/fib_trie, each once. Pure."""
    return tuple(dict.fromkeys(_LOCAL.findall(table)))


def local_ipv6(table: str) -> tuple[str, ...]:
    """In the text of /proc/net/if_inet6: 32 hexadecimal digits at the beginning of each line.
    Pure."""
    words = [line.split()[0] for line in table.splitlines() if line.strip()]
    return tuple(str(ipaddress.IPv6Address(int(word, 16))) for word in words)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # a kernel without that protocol
        return ""


def _resolved(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(one[4][0]) for one in found))
