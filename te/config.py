# SPDX-License-Identifier: Apache-2.0
"""Settings of an engine, checked when the configuration is made."""

from __future__ import annotations

import difflib
import ipaddress
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from te.core.engine import WORKERS_LIMIT
from te.core.staging import SLOTS_MAX
from te.core.wire import FRAME_BLOCKS_MAX, RAILS_LIMIT
from te.proof import KEY_BYTES, KEYS_MAX
from te.status import default_directory
from te.transports import registry

__all__ = ["GID_INDEX_AUTOMATIC", "LABEL_CHARS_MAX", "LIMITS", "TRANSPORTS", "Config"]

TRANSPORTS = registry.NAMES
"""Names of the transports that an engine offers and uses by default, in order of preference."""

GID_INDEX_AUTOMATIC: Final = -1
"""As a value of ``Config.gid_index``: the same as None. Other engines call it so, too."""

LIMITS: Final[Mapping[str, tuple[int, int]]] = {
    "port": (0, 65535),
    "port_last": (1, 65535),
    "rails": (1, RAILS_LIMIT),
    "rails_per_nic": (1, RAILS_LIMIT),
    "workers": (1, WORKERS_LIMIT),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "partition_key_index": (0, 65535),
    "gid_index": (GID_INDEX_AUTOMATIC, 255),
}
"""Smallest and largest value of integer fields, for code that reads them from elsewhere."""

LABEL_CHARS_MAX: Final = 200
"""Characters that ``Config.label`` may have."""

_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "bool": (bool, "True or False"),
    "int": (numbers.Integral, "a whole number"),
    "float": (numbers.Real, "a number"),
    "str": (str, "a text"),
    "Path": (Path, "a pathlib.Path"),
    "tuple[str, ...]": (str, "a tuple of texts"),
    "tuple[bytes, ...]": (object, "a tuple of bytes"),  # `_check_keys` looks at each
}
"""By annotation of a field: what it is, or its items are, and how that is called."""

SEGMENT_BYTES_MAX = 64 << 20
# Linux takes 1024 iovecs a call (UIO_MAXIOV); headers, trailer and acknowledgements need some.
SEGMENT_BLOCKS_MAX = FRAME_BLOCKS_MAX


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of one engine.

    Raises ``ValueError`` that names the field and its value when one is out of range.
    """

    #: Address to listen on. The card carries it to peers, so peers must be able to reach it.
    host: str = "127.0.0.1"
    #: False: this engine has no card, and peers cannot connect to it. It listens nowhere, and has a
    #: thread less unless it uses RDMA devices.
    listens: bool = True
    #: TCP port to listen on; 0 lets the kernel choose a free one.
    port: int = 0
    #: Last port of a range that begins with ``port``: the engine listens on the first free port in
    #: it. With iWARP the engine takes one more port of the range for each address of a device.
    port_last: int | None = None
    #: Transports that this engine offers and uses, in order of preference. Each peer is reached by
    #: the first transport that works. If only one is named and does not work, connecting raises
    #: ``te.ConnectError``.
    transports: tuple[str, ...] = TRANSPORTS
    #: Keys of 32 random bytes, or derived from a secret. Two engines connect only if they have a
    #: key in common. This engine proves the first of its keys that the peer has, and accepts any of
    #: its keys from a peer. To replace one, give all engines (old, new), then all (new, old), then
    #: (new,). An engine without keys connects with every other engine that has none.
    keys: tuple[bytes, ...] = field(default=(), repr=False)
    #: Encrypts everything that goes over the network, with keys that the greetings derive from
    #: ``keys``. The kernel encrypts if the kernels of both hosts can (``modprobe tls``), else
    #: libcrypto does. The engine does not use transports that cannot encrypt. Peers must have the
    #: same setting.
    encrypt: bool = False
    #: Connections to a peer, over which transfers are striped; the smaller setting of both engines
    #: counts. RDMA has one rail for each pair of devices instead, times ``rails_per_nic``.
    rails: int = 2
    #: Queue pairs to a peer for each pair of RDMA devices; a link has at most ``RAILS_LIMIT`` queue
    #: pairs in all. A bonded port may need two to use both of its wires.
    rails_per_nic: int = 1
    #: Threads that move bytes, for all peers together; never more than the host has cores.
    workers: int = 2
    #: How long a thread that has just moved bytes, or waits for a small write, polls before it
    #: sleeps: waking up takes longer than moving a few KiB.
    spin_s: float = 50e-6
    #: Source address of TCP connections to peers; None lets the kernel choose.
    source_host: str | None = None
    #: Deadline for a connection and its greetings, on both sides.
    connect_timeout_s: float = 5.0
    #: A connection is closed, and its transfers fail, when its oldest unfinished transfer makes no
    #: progress for this long.
    stall_timeout_s: float = 5.0
    #: RDMA devices to use: ``fnmatch`` patterns, with ``!`` before devices to exclude. Without
    #: patterns the engine uses all active devices.
    nics: tuple[str, ...] = ()
    #: JSON file that maps each memory location (see ``Engine.register``) to preferred and fallback
    #: RDMA devices: ``{"cuda:0": [["mlx5_0"], ["mlx5_1"]], "*": [["mlx5_0", "mlx5_1"]]}``. The
    #: engine uses no device that the file does not name. ``te topology --override FILE`` shows the
    #: resulting order.
    topology: Path | None = None
    #: An RDMA rail on which no work request completes for this long is destroyed and made anew,
    #: because a device may retry for ever. With one that is longer than
    #: ``stall_timeout_s`` by a third the link ends before its rails do.
    rail_timeout_s: float = 2.0
    #: Longest pause between two attempts to make an RDMA rail anew. When a local port gets its link
    #: back the engine tries at once; a fault behind a switch shows only by trying.
    rail_backoff_max_s: float = 1.0
    #: Traffic class of RDMA packets (ibv_modify_qp(3)), which networks map to priorities. iWARP
    #: ignores this and the next three settings, since it is TCP to the network.
    traffic_class: int = 0
    #: InfiniBand service level, or Ethernet priority (0 to 7) with RoCE (ibv_modify_qp(3)).
    service_level: int = 0
    #: Index into each port's table of partition keys (ibv_modify_qp(3)).
    partition_key_index: int = 0
    #: RoCE: index into each port's GID table. Without it the engine tries the GIDs with each peer,
    #: the most likely one first; -1 means the same. Within an InfiniBand subnet no GID is used.
    gid_index: int | None = None
    #: Most unfinished transfers to one peer; one more raises ``te.QueueFull``.
    max_queued_transfers: int = 1024
    #: Most incoming connections; one more is refused. A quarter of them is for others than the
    #: source that has the most: an address, an IPv6 network of 64 bits, or a process of this host.
    max_connections: int = 1024
    #: Payload bytes of one segment: the unit after which a cancelled transfer stops.
    segment_bytes: int = 4 << 20
    #: Most blocks in one segment.
    segment_blocks: int = SEGMENT_BLOCKS_MAX
    #: Send and receive buffer of each TCP connection; 0 leaves both to the kernel's auto-tuning,
    #: which was faster on loopback (kv 4.0 against 3.6 GB/s with 4 MiB). net.core.{w,r}mem_max are
    #: upper limits.
    socket_buffer_bytes: int = 0

    #: Pinned host memory through which memory is staged that the kernel cannot access (GPU memory
    #: over TCP and on the same host). All workers and both directions share it. The engine
    #: allocates it when the first such region is registered.
    staging_bytes: int = 64 << 20
    #: Size of one staged copy: smaller copies overlap better with the network, and need more calls
    #: of the GPU's driver.
    staging_slot_bytes: int = 2 << 20

    #: Where programs of the same user find this engine to ask how it is, as ``te top`` does
    #: (``te.status``): the engine makes the directory with mode 0700 and puts a Unix socket into
    #: it. None: nobody can ask.
    status_dir: Path | None = field(default_factory=default_directory)
    #: What the application calls this engine, for people: ``te top`` shows it instead of the
    #: program's name. At most 200 characters (``LABEL_CHARS_MAX``).
    label: str = ""

    def __post_init__(self) -> None:
        for one in fields(self):
            _check_kind(one.name, getattr(self, one.name), str(one.type))
        _check_host(self.host)
        _check_transports(self.transports)
        _check_keys(self.keys)
        if self.encrypt and not self.keys:
            raise ValueError("encrypt=True needs keys: give all engines the same ones")
        for name, limits in LIMITS.items():
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, *limits)
        if self.gid_index == GID_INDEX_AUTOMATIC:
            object.__setattr__(self, "gid_index", None)
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
            slots * self.staging_slot_bytes * SLOTS_MAX,
        )
        _check_range("socket_buffer_bytes", self.socket_buffer_bytes, 0, 1 << 30)
        _check_timeout("connect_timeout_s", self.connect_timeout_s)
        _check_timeout("stall_timeout_s", self.stall_timeout_s)
        _check_timeout("rail_timeout_s", self.rail_timeout_s)
        _check_timeout("rail_backoff_max_s", self.rail_backoff_max_s)
        if len(self.label) > LABEL_CHARS_MAX:
            raise ValueError(
                f"label has {len(self.label)} characters, and may have {LABEL_CHARS_MAX}"
            )
        if self.topology is not None and self.nics:
            raise ValueError(
                f"topology={str(self.topology)!r} is complete:"
                f" nics={self.nics} cannot be given beside it"
            )


def _check_kind(name: str, value: Any, annotation: str) -> None:
    """Who calls without a type checker learns here what a field takes. True is a whole number in
    Python, and is refused as one; a list is as good as a tuple."""
    wanted, _, none = annotation.partition(" | ")
    if value is None and none:
        return
    kind, what = _KINDS[wanted]
    if wanted.startswith("tuple"):
        is_right = isinstance(value, tuple | list) and all(isinstance(one, kind) for one in value)
    else:
        is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if is_right:
        return
    shown = type(value).__name__ if name == "keys" else repr(value)
    raise ValueError(f"{name}={shown} must be {what}{' or None' if none else ''}")


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
                f" available: {', '.join(registry.NAMES)}{_instead(name)}"
            )


def _instead(name: str) -> str:
    found = difflib.get_close_matches(str(name).lower(), registry.NAMES, 1)
    return f". Did you mean {found[0]!r}?" if found else ""


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
