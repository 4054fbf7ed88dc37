# SPDX-License-Identifier: Apache-2.0
"""te copies bytes between registered memory of processes, on one host or over a network.

An ``Engine`` owns the registered memory, the peers and the arrivals of one process. The destination
registers memory, gives its card to the source and opens a tag. The source connects with the card
and writes blocks under that tag. The destination then sees the arrival; or it fences the tag, after
which it may use the memory for something else.
"""

from __future__ import annotations

from te.blocks import BLOCK, Blocks
from te.buffers import Buffer, allocate
from te.config import Config
from te.digests import Digester
from te.engine import Engine
from te.errors import (
    BoundsError,
    ClosedError,
    ConnectError,
    DeviceError,
    DigestError,
    Error,
    FenceTimeout,
    HandshakeError,
    KeyMismatch,
    ListenError,
    QueueFull,
    RegistrationError,
    StatusSocketError,
    TopologyError,
    TransferFailed,
    TransportMismatch,
    VersionError,
    WaitTimeout,
)
from te.fences import Fence
from te.memory import Region, Remote
from te.peers import Note, Peer
from te.stats import (
    FenceStats,
    LinkStats,
    Outcomes,
    RailFlow,
    RailStats,
    Stats,
    TransportStats,
)
from te.tags import Identity, new_tag
from te.transfers import Status, Transfer

__all__ = [
    "BLOCK",
    "Blocks",
    "BoundsError",
    "Buffer",
    "ClosedError",
    "Config",
    "ConnectError",
    "DeviceError",
    "DigestError",
    "Digester",
    "Engine",
    "Error",
    "Fence",
    "FenceStats",
    "FenceTimeout",
    "HandshakeError",
    "Identity",
    "KeyMismatch",
    "LinkStats",
    "ListenError",
    "Note",
    "Outcomes",
    "Peer",
    "QueueFull",
    "RailFlow",
    "RailStats",
    "Region",
    "RegistrationError",
    "Remote",
    "Stats",
    "Status",
    "StatusSocketError",
    "TopologyError",
    "Transfer",
    "TransferFailed",
    "TransportMismatch",
    "TransportStats",
    "VersionError",
    "WaitTimeout",
    "allocate",
    "new_tag",
]


def __getattr__(name: str) -> str:
    """``__version__``, which is looked up when somebody asks: that takes longer than the rest."""
    if name == "__version__":
        from te.version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
