# SPDX-License-Identifier: Apache-2.0
"""Which NICs there are, how far each is from which memory, and by which address to reach it.

``machine`` reads what the kernel says below a root directory, ``locality`` ranks NICs per memory
location (or takes the user's word for it), ``choice`` does which of the two is wanted, ``gids``
lists the addresses of a port and the order in which to try them with a peer, ``addresses`` those of
an iWARP device. ``report`` is ``te topology``.
"""

from __future__ import annotations

from te.topology.addresses import bytes_per_s_of, read_addresses
from te.topology.choice import choose_topology
from te.topology.gids import Gid, GidKind, gid_pairs, read_gids
from te.topology.locality import (
    ANYWHERE,
    Link,
    Locality,
    Topology,
    choose_nics,
    parse_override,
    rank,
)
from te.topology.machine import Gpu, Machine, Nic, read_machine

__all__ = [
    "ANYWHERE",
    "Gid",
    "GidKind",
    "Gpu",
    "Link",
    "Locality",
    "Machine",
    "Nic",
    "Topology",
    "bytes_per_s_of",
    "choose_nics",
    "choose_topology",
    "gid_pairs",
    "parse_override",
    "rank",
    "read_addresses",
    "read_gids",
    "read_machine",
]
