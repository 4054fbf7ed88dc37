# SPDX-License-Identifier: Apache-2.0
"""The RDMA devices that an engine uses, and its memory as they know it."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import mmap
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from te.core.regions import UNUSED, packed_key
from te.core.wire import MAY_READ, MAY_WRITE_TAGGED, MAY_WRITE_UNTAGGED, NICS_LIMIT
from te.errors import DeviceError, RegistrationError
from te.memory_kinds import MemoryKind, Reach
from te.topology import (
    Gid,
    Topology,
    choose_topology,
    read_addresses,
    read_machine,
)
from te.topology import Nic as MachineNic
from te.topology.gids import parse_gid
from te.verbs import _core as verbs

__all__ = [
    "Fabric",
    "Nic",
    "Registration",
    "first_that_works",
    "open_fabric",
    "read_device_gids",
]

logger = logging.getLogger(__name__)

PORT_STATE_ACTIVE = 4  # enum ibv_port_state
GID_ROCE_V2 = 2


@dataclass(frozen=True)
class Nic:
    """An open device with an active port."""

    #: Position among the engine's devices, and on its card.
    index: int
    name: str
    port: int
    device: verbs.Device
    #: ``"ib"``, ``"roce"`` or ``"iwarp"``: what it can be connected with.
    family: str
    #: The port's GIDs; for iWARP the IP addresses of its interface, by their position here.
    gids: tuple[Gid, ...]
    #: InfiniBand's local address of the port; 0 elsewhere.
    lid: int
    #: As ``enum ibv_mtu``.
    mtu: int
    max_message_bytes: int
    #: Largest memory region.
    max_region_bytes: int
    #: The network interface behind it; empty if there is none.
    netdev: str
    #: Speed of the port; 0 if it is not known.
    bytes_per_s: float

    def check_port(self) -> None:
        """``OSError`` if the port has no link now: connecting over it would take its time to fail,
        and miss the link's return."""
        if self.device.port(self.port)[0] != PORT_STATE_ACTIVE:
            raise OSError(errno.ENETDOWN, f"the port {self.port} of {self.name} has no link")


@dataclass(frozen=True)
class Registration:
    """A range of memory that every device has accepted."""

    #: The keys of its parts, one behind the other, as ``te.core.regions.packed_key`` makes them.
    keys: bytes
    #: How many parts it has: a device takes only so many bytes at once.
    ranges: int
    regions: tuple[verbs.MemoryRegion, ...]
    #: Its memory location, as the caller gave it or te found it.
    location: str
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def close(self) -> None:
        """After it returns nothing lands there through any device. ``te.RegistrationError``.

        Several threads may call it: one that deregisters the memory, and one that closes the
        engine. ibv_dereg_mr(3) is called once for each.
        """
        with self._lock:
            for region in self.regions:
                try:
                    region.close()
                except OSError as exc:
                    raise RegistrationError(exc.strerror) from exc


class Fabric:
    """All devices of an engine. Any thread may call anything."""

    def __init__(self, nics: tuple[Nic, ...], topology: Topology, nodes: tuple[int, ...]) -> None:
        """``open_fabric`` makes it."""
        self.nics = nics
        self._topology = topology
        self._nodes = nodes

    def close(self) -> None:
        """Nothing is made of the devices any more; each is closed once what was made of it is."""
        for nic in self.nics:
            nic.device.close()

    def distances(self, location: str) -> tuple[int, ...]:
        """By device, how far it is from the memory (``te.topology.Topology.distance``), or
        ``UNUSED``."""
        found = (self._topology.distance(location, nic.name) for nic in self.nics)
        return tuple(UNUSED if distance is None else distance for distance in found)

    def location(self, address: int, kind: MemoryKind) -> str:
        """Where registered memory of the kind is: ``cpu:0``, ``cuda:0`` (the GPU by its place among
        all of the machine), or ``*`` when nobody tells.

        By its first page: a pool is usually bound to one node, or filled by threads of one.
        """
        if Reach.CPU in kind.reach and len(self._nodes) == 1:
            return f"cpu:{self._nodes[0]}"
        return kind.location(address, self._topology.gpus)

    def register(
        self, address: int, nbytes: int, rights: int, kind: MemoryKind, location: str | None = None
    ) -> Registration:
        """With every device or with none; ``te.RegistrationError`` names the verb that failed.

        ``rights``: what peers may do, bits of ``te.memory.RIGHTS``. A key allows no more than that;
        it cannot tell a write with a tag from one without. Memory that the processor does not touch
        a device takes as a dma-buf, or through the kernel's peer-memory module (nvidia-peermem).
        """
        limit = min(nic.max_region_bytes for nic in self.nics)
        part_bytes = max(limit - limit % mmap.PAGESIZE, mmap.PAGESIZE)
        starts = range(address, address + nbytes, part_bytes)
        parts: list[list[verbs.MemoryRegion]] = []
        with contextlib.ExitStack() as undo, _ways(address, nbytes, rights, kind) as ways:
            for start in starts:
                end = min(start + part_bytes, address + nbytes)
                parts.append([])
                for nic in self.nics:
                    region = first_that_works(ways, nic, start, end - start)
                    undo.callback(region.close)
                    parts[-1].append(region)
            undo.pop_all()
        # Only now: memory that the devices have pinned has pages, which have a place.
        where = location or self.location(address, kind)
        distances = self.distances(where)
        keys = [
            packed_key(
                start,
                min(start + part_bytes, address + nbytes),
                [one.lkey for one in part],
                [one.rkey for one in part],
                distances,
            )
            for start, part in zip(starts, parts, strict=True)
        ]
        regions = tuple(one for part in parts for one in part)
        return Registration(b"".join(keys), len(parts), regions, where)


Way = Callable[[Nic, int, int], verbs.MemoryRegion]
"""Registers bytes at an address with a device; ``OSError``."""


def first_that_works(
    ways: Sequence[Way], nic: Nic, address: int, nbytes: int
) -> verbs.MemoryRegion:
    """Tries one after the other; ``te.RegistrationError`` with what failed in each."""
    problems = []
    for way in ways:
        try:
            region = way(nic, address, nbytes)
        except OSError as exc:
            problems.append(str(exc.strerror))
            if exc.errno == errno.ENOMEM:
                problems[-1] += "; raise the limit of locked memory"
                problems[-1] += " (ulimit -l unlimited, LimitMEMLOCK=infinity)"
        else:
            if problems:
                logger.info("registered by another way than the first: %s", "; ".join(problems))
            return region
    raise RegistrationError("; ".join(problems))


def _access(nic: Nic, rights: int) -> tuple[bool, bool]:
    """Whether a device shall let peers read there, and write. iWARP brings the bytes of this side's
    own reads as writes of the peer's, so that their destination needs that right (RFC 5040, 5.2).
    Its key is told to nobody before such a read."""
    is_written = bool(rights & (MAY_WRITE_TAGGED | MAY_WRITE_UNTAGGED))
    return bool(rights & MAY_READ), is_written or nic.family == "iwarp"


@contextlib.contextmanager
def _ways(address: int, nbytes: int, rights: int, kind: MemoryKind) -> Iterator[tuple[Way, ...]]:
    """How the memory may be registered, the preferred way first."""

    def plainly(nic: Nic, address: int, nbytes: int) -> verbs.MemoryRegion:
        is_read, is_written = _access(nic, rights)
        return nic.device.register(
            address, nbytes, relaxed=True, remote_read=is_read, remote_write=is_written
        )

    if Reach.CPU in kind.reach:
        yield (plainly,)
        return
    start = address - address % mmap.PAGESIZE  # A dma-buf is whole pages.
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    with contextlib.ExitStack() as undo:
        fd, problem = -1, None
        try:
            fd = kind.dma_buf(start, end - start)
            undo.callback(os.close, fd)
        except OSError as exc:
            problem = exc

        def as_dma_buf(nic: Nic, address: int, nbytes: int) -> verbs.MemoryRegion:
            if problem is not None:
                raise problem
            return nic.device.register_dma_buf(
                fd, address - start, address, nbytes, *_access(nic, rights)
            )

        yield as_dma_buf, plainly


def open_fabric(
    patterns: tuple[str, ...],
    override: Path | None,
    gid_index: int | None = None,
    partition_key_index: int = 0,
) -> Fabric:
    """Opens the active devices that the file ``override`` names; without one those whose names
    match one of the ``fnmatch`` patterns; all if there are none. Those without the entries that the
    two indices name are left out.

    Raises ``te.DeviceError`` that says what is missing when there is not a single one,
    ``te.TopologyError`` for a bad file or pattern.
    """
    machine = read_machine()
    # A file is read before anything else: it is wrong even where there are no devices.
    wanted = None if override is None else choose_topology(machine, (), override)
    try:
        verbs.load()
        known = dict(verbs.device_list())
    except OSError as exc:
        text = exc.strerror
        if exc.errno == errno.ENOSYS and "ibv_" in str(text):
            text = (
                "the kernel's RDMA modules are not loaded: load rdma_ucm, ib_uverbs and the"
                " device's driver"
            )
        raise DeviceError(f"no RDMA device: {text}") from exc
    topology = wanted or choose_topology(machine, patterns, None)
    nics: list[Nic] = []
    problems: list[str] = []
    for one in topology.nics:
        if one.device not in known:
            problems.append(f"{one.name}: {_unknown(one)}")
        elif len(nics) == NICS_LIMIT:
            problems.append(f"{one.name}: an engine uses {NICS_LIMIT} devices")
        else:
            try:
                nic = _open(len(nics), one, known[one.device], partition_key_index)
                nics.append(_with_gid(nic, gid_index))
            except DeviceError as exc:
                problems.append(str(exc))
    if not nics:
        raise DeviceError(f"no RDMA device: {'; '.join(problems) or 'this host has none'}")
    for problem in problems:
        logger.warning("not used: %s", problem)
    return Fabric(tuple(nics), topology, machine.nodes)


def _unknown(one: MachineNic) -> str:
    """Why the kernel has the device and libibverbs does not."""
    path = Path("/dev/infiniband") / one.uverbs
    if not path.exists():
        return f"there is no {path}; in a container start it with --device=/dev/infiniband"
    if not os.access(path, os.R_OK | os.W_OK):
        return f"{path} may not be opened; give this user read and write permission for it"
    return (
        "libibverbs has no provider for this device; install one (apt-get install"
        " ibverbs-providers)"
    )


def read_device_gids(one: MachineNic, device: verbs.Device) -> tuple[Gid, ...]:
    """The table of a port, as ``te.topology.read_gids``, but from the open device, in one call.
    ``OSError``."""
    found = []
    for port, number, raw, kind, netdev in device.gids():
        name = ""
        with contextlib.suppress(OSError):
            name = socket.if_indextoname(netdev) if netdev else ""
        text = "RoCE v2" if kind == GID_ROCE_V2 else ""
        gid = parse_gid(number, str(ipaddress.IPv6Address(raw)), text, name, one)
        if port == one.port and gid is not None:
            found.append(gid)
    return tuple(found)


def _open(index: int, one: MachineNic, is_iwarp: bool, partition_key_index: int) -> Nic:
    try:
        device = verbs.Device(one.device)
        state, mtu, lid, is_ethernet, partition_keys, max_message = device.port(one.port)
        gids = read_addresses(one.netdev) if is_iwarp else read_device_gids(one, device)
    except OSError as exc:
        raise DeviceError(f"{one.name}: {exc.strerror}") from exc
    if state != PORT_STATE_ACTIVE:
        raise DeviceError(
            f"{one.name}: its port {one.port} is {one.state or 'down'}, not active;"
            f" bring its link up{f' (ip link set {one.netdev} up)' if one.netdev else ''}"
        )
    if not is_iwarp and partition_key_index >= partition_keys:
        raise DeviceError(
            f"{one.name}: partition_key_index={partition_key_index}, but its port {one.port} has"
            f" {partition_keys} partition keys, counted from 0"
        )
    if is_ethernet and not is_iwarp and not any(gid.roce == 2 for gid in gids):
        raise DeviceError(f"{one.name}: no RoCE v2 GID; give {one.netdev or 'it'} an IP address")
    if is_iwarp and not gids:
        raise DeviceError(f"{one.name}: no IP address; give {one.netdev or 'it'} one")
    return Nic(
        index=index,
        name=one.name,
        port=one.port,
        device=device,
        family="iwarp" if is_iwarp else "roce" if is_ethernet else "ib",
        gids=gids,
        lid=lid,
        mtu=mtu,
        max_message_bytes=max_message,
        max_region_bytes=device.limits[0],
        netdev=one.netdev,
        bytes_per_s=one.rate_gbps * 1e9 / 8,
    )


def _with_gid(nic: Nic, gid_index: int | None) -> Nic:
    """With that address alone, where addresses of the table are used; ``te.DeviceError``."""
    if gid_index is None or nic.family != "roce":
        return nic
    gids = tuple(gid for gid in nic.gids if gid.index == gid_index and gid.roce == GID_ROCE_V2)
    if not gids:
        there = ", ".join(f"{gid.index} ({gid.text})" for gid in nic.gids if gid.roce == 2)
        raise DeviceError(
            f"{nic.name}: gid_index={gid_index} is no RoCE v2 GID of its port {nic.port}, which has"
            f" {there}"
        )
    return replace(nic, gids=gids)
