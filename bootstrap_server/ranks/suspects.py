# SPDX-License-Identifier: Apache-2.0
"""Which ranks may have ended, when another life asks for a place that is held. Pure.

A lease outlives a process that was killed. When the server is started again on the same host, its
ranks need not wait for the leases of their former selves, if these have ended. Two things tell it:

1. The connection over which the former rank renewed its lease was closed by the rank's side. A
   kernel does that when a process ends; a process that hangs or stands still keeps it.
2. Nothing listens on the former rank's port, which its host says by refusing a connection.

Either alone may be wrong about a rank that lives. The first is, while a rank that was cut off
connects again. The second is wherever the rank's address leads from here to another host: behind a
translation of addresses, or a load balancer. So both are asked for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from typing import NamedTuple

from bootstrap_server.ranks.records import Rank

__all__ = ["Suspects", "suspects"]


class Suspects(NamedTuple):
    """Ranks of the host of a newcomer whose connections are closed.

    `replaced`: another life listens on their ports, and no two processes can listen on one.
    `to_ask`: they have ended if a connection to their ports is refused.
    """

    replaced: tuple[Rank, ...]
    to_ask: tuple[Rank, ...]


def suspects(
    leased: Iterable[Rank], newcomer: Rank, source: str, is_lost: Callable[[Rank], bool]
) -> Suspects:
    """`leased`: the ranks of a prefill instance that hold leases. `source`: the address from which
    the newcomer asks. `is_lost`: whether the rank's own side has closed its connection.

    All ranks of the host are looked at, not only the one whose place is asked for: otherwise an
    instance would for a moment be whole with a rank that has ended.
    """
    if not _can_be_asked(newcomer.host, source):
        return Suspects((), ())
    here = [rank for rank in leased if rank.host == newcomer.host]
    newest: dict[int, int] = {}
    for rank in (*here, newcomer):
        newest[rank.port] = max(rank.epoch, newest.get(rank.port, 0))
    lost = [rank for rank in here if is_lost(rank)]
    return Suspects(
        tuple(rank for rank in lost if rank.epoch < newest[rank.port]),
        tuple(rank for rank in lost if rank.epoch == newest[rank.port]),
    )


def _can_be_asked(host: str, source: str) -> bool:
    """Whether `host` can be the same host for the registry and for a rank that asks from `source`.
    A name need not be, nor an address that holds on one link, nor this host's own."""
    try:
        address, asker = ipaddress.ip_address(host), ipaddress.ip_address(source)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return asker.is_loopback
    return not (address.is_unspecified or address.is_multicast or address.is_link_local)
