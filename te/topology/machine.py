# SPDX-License-Identifier: Apache-2.0
"""NICs, GPUs and NUMA nodes as sysfs shows them (Documentation/ABI/stable/sysfs-class-infiniband).

Everything is read below a root directory, so that the files of another machine will do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import msgspec

__all__ = ["NUMA_UNKNOWN", "Gpu", "Machine", "Nic", "read_machine"]

NUMA_UNKNOWN: Final = -1

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
# Class codes 0x0300 (VGA) and 0x0302 (3D controller), 0x1200 (processing accelerator) of the
# vendors whose memory a NIC can reach.
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
_GPU_VENDORS = ("0x10de", "0x1002")


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One port of an RDMA device."""

    #: ``mlx5_0``; ``mlx5_0:2`` for the second port of a device.
    name: str
    device: str
    port: int
    #: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``.
    state: str
    #: ``CA`` (InfiniBand, RoCE) or ``RNIC`` (iWARP).
    kind: str
    #: ``Ethernet`` or ``InfiniBand``.
    link_layer: str
    rate_gbps: float
    numa: int
    #: Host bridge, bridges and the device itself; empty for a device without one.
    pci: tuple[str, ...]
    #: Its network interface, ``""`` without one.
    netdev: str
    #: ``uverbs0``: its file in /dev/infiniband; ``""`` when user space cannot use it.
    uverbs: str

    @property
    def is_active(self) -> bool:
        """Whether its port carries data."""
        return self.state == "ACTIVE"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU; ``index`` counts by PCI address, as CUDA does with CUDA_DEVICE_ORDER=PCI_BUS_ID."""

    index: int
    numa: int
    pci: tuple[str, ...]

    @property
    def address(self) -> str:
        """``0000:1b:00.0``."""
        return self.pci[-1]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What there is, in a stable order."""

    nics: tuple[Nic, ...]
    gpus: tuple[Gpu, ...]
    #: NUMA nodes with memory; one at least.
    nodes: tuple[int, ...]


def read_machine(root: Path = Path("/")) -> Machine:
    """Reads sysfs below ``root``. What is missing there is not on the machine."""
    sys = root / "sys"
    found = sorted((sys / "class/infiniband").glob("*"), key=lambda path: _natural(path.name))
    uverbs = {
        _text(path / "ibdev"): path.name
        for path in (sys / "class/infiniband_verbs").glob("uverbs*")
    }
    nics = tuple(nic for path in found for nic in _ports(sys, path, uverbs.get(path.name, "")))
    chains = sorted(filter(None, map(_gpu_chain, (sys / "bus/pci/devices").glob("*"))))
    by_address = sorted(chains, key=lambda chain: chain[-1])
    gpus = tuple(
        Gpu(index=i, numa=_numa(sys, chain), pci=chain) for i, chain in enumerate(by_address)
    )
    return Machine(nics=nics, gpus=gpus, nodes=_nodes(sys))


def _ports(sys: Path, device: Path, uverbs: str) -> list[Nic]:
    ports = sorted((device / "ports").glob("*"), key=lambda path: int(path.name))
    nics = []
    for path in ports:
        number = int(path.name)
        netdev = _netdev(device, path)
        chain = _chain(device / "device") or _chain(sys / "class/net" / netdev / "device")
        nics.append(
            Nic(
                name=device.name if number == 1 else f"{device.name}:{number}",
                device=device.name,
                port=number,
                state=_text(path / "state").partition(":")[2].strip() or "DOWN",
                kind=_text(device / "node_type").partition(":")[2].strip() or "CA",
                link_layer=_text(path / "link_layer"),
                rate_gbps=_rate(_text(path / "rate")),
                numa=_numa(sys, chain),
                pci=chain,
                netdev=netdev,
                uverbs=uverbs,
            )
        )
    return nics


def _netdev(device: Path, port: Path) -> str:
    # Soft-RoCE names its interface in ``parent``; every driver does beside its first GID, if there
    # is one; cards have a directory of their interfaces, which count their ports from 0.
    named = _text(device / "parent") or _text(port / "gid_attrs/ndevs/0")
    if named:
        return named
    number = str(int(port.name) - 1)
    interfaces = sorted((device / "device/net").glob("*"))
    return next((path.name for path in interfaces if _text(path / "dev_port") == number), "")


def _gpu_chain(device: Path) -> tuple[str, ...]:
    is_gpu = (
        _text(device / "class")[:6] in _GPU_CLASSES and _text(device / "vendor") in _GPU_VENDORS
    )
    return _chain(device) if is_gpu else ()


def _chain(device: Path) -> tuple[str, ...]:
    """Host bridge to device, along the directories of its place in /sys/devices."""
    parts = Path(os.path.realpath(device)).parts
    chain = tuple(part for part in parts if _PCI_ADDRESS.fullmatch(part))
    bridges = tuple(part for part in parts if _HOST_BRIDGE.fullmatch(part))
    return bridges[:1] + chain if chain else ()


def _numa(sys: Path, chain: tuple[str, ...]) -> int:
    if not chain:
        return NUMA_UNKNOWN
    text = _text(sys / "bus/pci/devices" / chain[-1] / "numa_node")
    return int(text) if text else NUMA_UNKNOWN


def _nodes(sys: Path) -> tuple[int, ...]:
    names = (path.name for path in (sys / "devices/system/node").glob("node[0-9]*"))
    return tuple(sorted(int(name.removeprefix("node")) for name in names)) or (0,)


def _rate(text: str) -> float:
    """``100 Gb/sec (4X EDR)``."""
    number = text.partition(" ")[0]
    try:
        return float(number)
    except ValueError:
        return 0.0


def _text(path: Path) -> str:
    """Its content; empty when the kernel has none to give (a GID that is not set: EINVAL)."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts mlx5_10 after mlx5_9."""
    parts = re.findall(r"\d+|\D+", name)
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
