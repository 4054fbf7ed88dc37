# SPDX-License-Identifier: Apache-2.0
"""Which TCP connections are ended when a host is severed. Pure: filters of ss(8)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["with_host", "with_others"]


def with_others(network: str, own: Sequence[str]) -> tuple[str, ...]:
    """On a host with the addresses `own`: all connections into the network, but for those that the
    host has with itself."""
    kept = [("and", "not", "(", "src", one, "and", "dst", one, ")") for one in own]
    return ("dst", network, *(word for words in kept for word in words))


def with_host(addresses: Sequence[str]) -> tuple[str, ...]:
    """On another host: all connections to one of these addresses."""
    return tuple(word for one in addresses for word in ("or", "dst", one))[1:]
