# SPDX-License-Identifier: Apache-2.0
"""What a server without a secret says of it, and when it does not start. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Exposure", "exposure"]

#: Of a host itself (RFC 1122 3.2.1.3, RFC 4291 2.5.3).
_ITS_OWN = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_ADVICE = "make one with `sglang-mooncake secret` and give it to all servers (docs/security.md)"


class Exposure(NamedTuple):
    """What is to be said of an address on which everybody is served.

    refused: the server must not start.
    """

    sentence: str
    refused: bool


def exposure(
    host: str,
    has_secret: bool,
    is_insecure: bool,
    how_to_insist: str,
    addresses: Sequence[str] = (),
) -> Exposure | None:
    """None where nobody from elsewhere can connect, or where there is a secret.

    Args:
        host: address or name that the server listens on.
        is_insecure: the operator has said that it may be open to all.
        how_to_insist: which option says so.
        addresses: those that are behind ``host``, if they are known: `own_addresses`.
    """
    if has_secret:
        return None
    known = [one for one in map(_address, addresses or (host,)) if one is not None]
    if known and all(any(one in network for network in _ITS_OWN) for one in known):
        return None
    public = next((one for one in known if one.is_global), None)
    if public is None:
        return Exposure(
            f"no secret is set: whoever can reach {host} can read and overwrite KV caches and take "
            f"the places of servers; {_ADVICE}",
            refused=False,
        )
    behind = "" if str(public) == host else f" ({public}, one of this host's)"
    if is_insecure:
        return Exposure(
            f"no secret is set, and {host} is a public address{behind}: whoever on the "
            f"internet can reach it can read and overwrite KV caches; {_ADVICE}",
            refused=False,
        )
    return Exposure(
        f"no secret is set, and {host} is a public address{behind}: whoever on the internet "
        f"can reach it could read and overwrite KV caches. Listen on a private address, or "
        f"{_ADVICE}, or start with {how_to_insist} if nobody else can reach it",
        refused=True,
    )


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None: it is a name."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])  # fe80::1%eth0
    except ValueError:
        return None
