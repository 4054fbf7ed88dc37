# SPDX-License-Identifier: Apache-2.0
"""Where servers are: hosts and URLs, and when two of them are of the same server. Pure."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

__all__ = ["Place", "host_key", "host_of", "is_host", "place_of", "port_of"]

#: Of a name in the DNS (RFC 1035). Names with underscores occur, as those of containers.
HOST_CHARS_MAX: Final = 253
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
#: The network interface of a link-local address.
_ZONE: Final = re.compile(r"[A-Za-z0-9._-]+")
_PORTS: Final = {"http": 80, "https": 443}
#: Names of this host for itself. Others of 127.0.0.0/8 may be other servers.
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Place(NamedTuple):
    """The same for all URLs that are spelled differently and name one server."""

    host: str
    port: int
    path: str


def host_of(url: str) -> str:
    """The host of a server's URL, as requests name it."""
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def port_of(parts: SplitResult) -> int:
    """The port of a server's URL, which its scheme tells where it names none; 0 of an unknown
    scheme. ``ValueError`` for what is no port."""
    return _PORTS.get(parts.scheme, 0) if parts.port is None else parts.port


def place_of(url: str) -> Place:
    """Where the server of a URL is. A name and its address are not known to be the same, but for
    those of this host to itself. ``ValueError`` for what is no URL."""
    parts = urlsplit(url)
    return Place(host_key(parts.hostname or ""), port_of(parts), parts.path.rstrip("/"))


def host_key(host: str) -> str:
    """The same for all spellings of a host. An IPv6 address may be in brackets."""
    key = host.strip("[]").lower().removesuffix(".")
    try:
        address = ip_address(key)
    except ValueError:
        pass
    else:
        if isinstance(address, IPv6Address):
            address = address.ipv4_mapped or address
        key = str(address)
    return "localhost" if key in _LOCAL else key


def is_host(text: str) -> bool:
    """Whether it is an IP address or a name that can be looked up, so that a URL with it is one of
    that host. A name of other letters than ASCII's is to be given in its ASCII form (``xn--``)."""
    if ":" in text:
        address, zone, name = text.partition("%")
        try:
            IPv6Address(address)
        except ValueError:
            return False
        return not zone or _ZONE.fullmatch(name) is not None
    return len(text) <= HOST_CHARS_MAX and _HOST_NAME.fullmatch(text) is not None
