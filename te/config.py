# SPDX-License-Identifier: Apache-2.0
"""What an engine can be told, checked when it is told."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from te.core.engine import WORKERS_LIMIT
from te.core.wire import FRAME_BLOCKS_MAX, RAILS_LIMIT
from te.proof import KEY_BYTES, KEYS_MAX
from te.transports import registry

__all__ = ["LIMITS", "TRANSPORTS", "Config"]

TRANSPORTS = registry.BY_DEFAULT
"""Names of the transports that an engine offers and uses by itself, the preferred one first."""

LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "port": (0, 65535),
    "port_last": (1, 65535),
    "rails": (1, RAILS_LIMIT),
    "rails_per_nic": (1, RAILS_LIMIT),
    "workers": (1, WORKERS_LIMIT),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "partition_key_index": (0, 65535),
    "gid_index": (0, 255),
}
"""Least and greatest value of fields that are numbers, for those that read them from elsewhere."""

SEGMENT_BYTES_MAX = 64 << 20
# Linux takes 1024 iovecs a call (UIO_MAXIOV); headers, trailer and acknowledgements need some.
# SLOTS_MAX of te/core/staging.pxd.
STAGING_SLOTS_MAX = 64
SEGMENT_BLOCKS_MAX = FRAME_BLOCKS_MAX


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one engine.

    Raises ``ValueError`` that names the field and its value when one is out of range.
    """

    #: Address to listen on; peers read it on the card, so it must be one they can reach.
    host: str = "127.0.0.1"
    #: TCP port to listen on; 0 takes any free one.
    port: int = 0
    #: With it, the engine listens on the first free port from ``port`` to this one. iWARP listens
    #: on further ones of them.
    port_last: int | None = None
    #: Transports this engine offers and uses, the preferred one first. Each peer gets the first
    #: that works; with only one named, not getting it is a ``te.ConnectError``.
    transports: tuple[str, ...] = TRANSPORTS
    #: Keys of 32 random bytes, or derived from a secret. Engines connect only if they have one in
    #: common: the first here that the peer has is proved to it, and any is accepted from it. To
    #: replace one, give all engines (old, new), then all (new, old), then (new,). Without any, an
    #: engine connects with all others that have none.
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    #: Encrypts all that goes over the network, with keys that the greetings derive from ``keys``:
    #: by the kernel where both hosts' can (``modprobe tls``), else by libcrypto. Transports that
    #: cannot encrypt are left out. Peers must have the same here.
    encrypt: bool = False
    #: Connections to a peer, which share the work; the peer's own setting is a bound, too. Over
    #: RDMA there are as many as devices, times ``rails_per_nic``.
    rails: int = 2
    #: Queue pairs to a peer by each pair of devices; a link has ``RAILS_LIMIT`` at most in all. A
    #: bonded port may need two to fill both wires.
    rails_per_nic: int = 1
    #: Threads that move bytes, over all peers; never more than cores.
    workers: int = 2
    #: How long a thread that has just moved bytes, or waits for a small write, looks again before
    #: it sleeps: waking up costs more than moving a few KiB.
    spin_s: float = 50e-6
    #: Address that TCP connections to peers come from; None leaves it to the kernel.
    source_host: str | None = None
    #: Longest time for a connection and its greetings, on both sides.
    connect_timeout_s: float = 5.0
    #: A connection ends, and its transfers fail, when the first of them that is unfinished makes
    #: no progress for so long.
    stall_timeout_s: float = 5.0
    #: RDMA devices to use: ``fnmatch`` patterns, ``!`` before those to leave out; all active ones
    #: when there are none.
    nics: tuple[str, ...] = ()
    #: JSON file that says which RDMA devices memory uses first, and which then:
    #: ``{"cuda:0": [["mlx5_0"], ["mlx5_1"]], "*": [["mlx5_0", "mlx5_1"]]}``, for the locations of
    #: ``Engine.register``. It is complete: no other device is used. ``te topology --override``
    #: shows it.
    topology: Path | None = None
    #: A rail over RDMA on which nothing completes for so long is given up, and made anew: a device
    #: may try for ever.
    rail_timeout_s: float = 2.0
    #: Longest time between two attempts to make a rail over RDMA anew. A port that gets its link
    #: back is tried at once; what is broken behind a switch has to be tried for.
    rail_backoff_max_s: float = 1.0
    #: Traffic class of packets over RDMA (ibv_modify_qp(3)); networks map it to priorities. It and
    #: the next three say nothing to iWARP, which is TCP to the network.
    traffic_class: int = 0
    #: Service level of InfiniBand, or priority of Ethernet, up to 7 there (ibv_modify_qp(3)).
    service_level: int = 0
    #: Entry of each port's table of partition keys (ibv_modify_qp(3)).
    partition_key_index: int = 0
    #: RoCE: the entry of each port's table of GIDs that is to be used; without it, all are tried
    #: with each peer, the likeliest first. Within an InfiniBand subnet none is used.
    gid_index: int | None = None
    #: Unfinished transfers a peer may have; one more raises ``te.QueueFull``.
    max_queued_transfers: int = 1024
    #: Incoming connections an engine accepts; one more is refused.
    max_connections: int = 1024
    #: Payload bytes of one segment: the unit after which a cancelled transfer stops.
    segment_bytes: int = 4 << 20
    #: Blocks of one segment.
    segment_blocks: int = SEGMENT_BLOCKS_MAX
    #: Send and receive buffer of each connection; 0 leaves them to the kernel's tuning, which was
    #: the faster choice on loopback (kv 4.0 against 3.6 GB/s with 4 MiB). net.core.{w,r}mem_max
    #: cap it.
    socket_buffer_bytes: int = 0

    #: Pinned host memory for memory that the kernel cannot touch (a GPU's, over TCP and on the same
    #: host), for all workers and both directions; taken with the first region that needs it.
    staging_bytes: int = 64 << 20
    #: Of that one copy's: smaller ones overlap better with the network, and cost more calls.
    staging_slot_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        _check_host(self.host)
        _check_transports(self.transports)
        _check_keys(self.keys)
        if self.encrypt and not self.keys:
            raise ValueError("encrypt=True needs keys: give all engines the same ones")
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, *limits)
        if self.port_last is not None and not 1 <= self.port <= self.port_last:
            raise ValueError(
                f"port={self.port} and port_last={self.port_last}: give the first and last port of"
                " a range"
            )
        _check_range("max_queued_transfers", self.max_queued_transfers, 1, 1 << 20)
        _check_range("max_connections", self.max_connections, 1, 1 << 16)
        _check_range("segment_bytes", self.segment_bytes, 1, SEGMENT_BYTES_MAX)
        _check_range("segment_blocks", self.segment_blocks, 1, SEGMENT_BLOCKS_MAX)
        if not 0 <= self.spin_s <= 0.1:
            raise ValueError(f"spin_s={self.spin_s} must be between 0 and 0.1 seconds")
        _check_range("staging_slot_bytes", self.staging_slot_bytes, 4096, SEGMENT_BYTES_MAX)
        slots = 2 * self.workers
        _check_range(
            "staging_bytes",
            self.staging_bytes,
            slots * self.staging_slot_bytes,
            slots * self.staging_slot_bytes * STAGING_SLOTS_MAX,
        )
        _check_range("socket_buffer_bytes", self.socket_buffer_bytes, 0, 1 << 30)
        _check_timeout("connect_timeout_s", self.connect_timeout_s)
        _check_timeout("stall_timeout_s", self.stall_timeout_s)
        _check_timeout("rail_timeout_s", self.rail_timeout_s)
        _check_timeout("rail_backoff_max_s", self.rail_backoff_max_s)
        if self.topology is not None and self.nics:
            raise ValueError(
                f"topology={str(self.topology)!r} is complete:"
                f" nics={self.nics} cannot be given beside it"
            )


def _check_host(host: str) -> None:
    if not host:
        raise ValueError("host must be an address or a name, not an empty string")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return  # A name: resolved when the engine starts to listen.
    if address.is_unspecified:
        raise ValueError(
            f"host={host!r} cannot be put on a card: give an address that peers can reach"
        )


def _check_transports(names: tuple[str, ...]) -> None:
    if not names or len(set(names)) != len(names):
        raise ValueError(f"transports={names!r} must name at least one transport, each once")
    for name in names:
        if name not in registry.NAMES:
            raise ValueError(
                f"transport {name!r} is not available in this build;"
                f" available: {', '.join(registry.NAMES)}"
            )


def _check_keys(keys: tuple[bytes, ...]) -> None:
    """Says nothing of what they are."""
    if len(keys) > KEYS_MAX or len(set(keys)) != len(keys):
        raise ValueError(f"keys has {len(keys)}: give at most {KEYS_MAX}, each once")
    for i, one in enumerate(keys):
        if not isinstance(one, bytes) or len(one) != KEY_BYTES:
            size = f"{len(one)} bytes" if isinstance(one, bytes) else type(one).__name__
            raise ValueError(f"keys[{i}] is of {size}, and must be of {KEY_BYTES} bytes")
        if not any(one):  # To HMAC it is the empty key, which everybody has.
            raise ValueError(f"keys[{i}] is all zeros: give random bytes")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{field}={value} must be between {low} and {high}")


def _check_timeout(field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{field}={value} must be a positive number of seconds")
