# SPDX-License-Identifier: Apache-2.0
"""Which registries a decode rank asks. Requests name them (`bootstrap_host`, `bootstrap_port`), so
without a list whoever may send requests decides whom the rank connects to."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from bootstrap_server import BootstrapError, split_address

__all__ = ["Registries", "addresses"]

_PORT = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:]*):(?P<port>[0-9]{1,5}|\*)")


@dataclass(frozen=True, slots=True)
class _Pattern:
    matches_host: Callable[[str], bool]
    port: int | None


@dataclass(frozen=True)
class Registries:
    """The registries that a list of patterns allows; an empty list allows all.

    A pattern is `HOST` or `HOST:PORT` (IPv6 with a port as `[HOST]:PORT`). HOST is a name or an
    address as requests spell it, where `*` and `?` stand for anything but a dot or a colon, or a
    network such as `10.1.0.0/16`. Names are not resolved.

    setting: what those who run the server call the list.

    Raises:
        ValueError: a pattern that is none; names it.
    """

    patterns: tuple[str, ...] = ()
    setting: str = field(default="registries", compare=False)
    _compiled: tuple[_Pattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_compiled", tuple(_pattern(text) for text in self.patterns))

    @property
    def exact(self) -> tuple[str, ...]:
        """Those of the list that are one address: ``HOST:PORT`` without a wildcard."""
        return tuple(
            text
            for text in self.patterns
            if not re.search(r"[*?/]", text) and _PORT.fullmatch(text) is not None
        )

    def allows(self, host: str, port: int) -> bool:
        return not self.patterns or any(
            pattern.port in (None, port) and pattern.matches_host(host)
            for pattern in self._compiled
        )


def addresses(given: tuple[str, ...]) -> tuple[str, ...]:
    """As given, each of the form ``HOST:PORT``; ValueError for one that is not."""
    for one in given:
        try:
            split_address(one)
        except BootstrapError as error:
            raise ValueError(f"{one!r} is not of the form HOST:PORT") from error
    return given


def _pattern(text: str) -> _Pattern:
    match = _PORT.fullmatch(text)
    host = (match["host"] if match else text).removeprefix("[").removesuffix("]")
    port = int(match["port"]) if match and match["port"] != "*" else None
    if not host or re.search(r"[\s\[\]@#]", host) or (port is not None and not 0 < port <= 65_535):
        raise ValueError(f"{text!r} is not of the form HOST, HOST:PORT or NETWORK/BITS")
    if "/" in host:
        try:
            return _Pattern(_in_network(ipaddress.ip_network(host)), port)
        except ValueError as error:
            raise ValueError(f"{text!r} is no network: {error}") from error
    # A star that matched dots would make 10.0.0.1.example.com one of 10.0.0.*.
    parts = {"*": "[^.:]*", "?": "[^.:]"}
    like = re.compile("".join(parts.get(c, re.escape(c)) for c in host), re.IGNORECASE)
    return _Pattern(lambda given: like.fullmatch(given) is not None, port)


def _in_network(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
) -> Callable[[str], bool]:
    def is_in(host: str) -> bool:
        try:
            return ipaddress.ip_address(host) in network
        except ValueError:
            return False  # a name

    return is_in
