# SPDX-License-Identifier: Apache-2.0
"""What decides about transports, as found on this machine. Looks, and changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from pathlib import Path

import msgspec

from te.doctor.pci import acs_redirects
from te.topology import Gid, Gpu, Machine, Nic, read_gids, read_machine
from te.transports.samehost._core import read_process
from te.transports.tcp.encryption import has_libcrypto
from te.verbs import _core as verbs
from te.verbs.fabric import read_device_gids

__all__ = ["UNLIMITED", "Bridge", "Facts", "Port", "gather"]

UNLIMITED = -1

# Bits of CapEff in /proc/self/status; linux/capability.h.
_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19
_MTU_MIN_LOG2 = 7  # enum ibv_mtu: IBV_MTU_256 is 1
_PEER_MEMORY_MODULES = ("nvidia_peermem", "nv_peer_mem")
_TCP_BUFFERS = ("net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA port, and whether this process may use its device."""

    nic: Nic
    gids: tuple[Gid, ...]
    #: Why its file in /dev/infiniband cannot be opened; ``""`` when it can.
    problem: str
    #: Of its network interface, in bytes; None without one.
    netdev_mtu: int | None = None
    #: Payload of its packets in bytes; None if the device was not asked, or does not tell.
    active_mtu: int | None = None
    #: Type of the IOMMU domain that it is in (``identity``, ``DMA``, ``DMA-FQ``); ``""`` if none.
    iommu: str = ""
    #: Whether congestion control (RoCE's ECN) is on for any priority; None if that is not known.
    has_ecn: bool | None = None


class Bridge(msgspec.Struct, frozen=True):
    """A PCI bridge on the way to a GPU or a NIC."""

    address: str
    #: Whether it sends peer-to-peer traffic up to the processor; None if that is not known.
    redirects: bool | None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the rules."""

    #: Library → why it cannot be loaded; ``""`` when it can.
    libraries: dict[str, str]
    ports: tuple[Port, ...]
    has_verbs_class: bool
    has_device_directory: bool
    #: Soft limit of locked memory in bytes, or ``UNLIMITED``.
    memlock_nbytes: int
    #: The kernel does not hold the limit of locked memory against this process.
    may_lock: bool
    #: ``kernel.yama.ptrace_scope``; None without Yama.
    ptrace_scope: int | None
    may_ptrace: bool
    #: Why this process cannot read even its own memory by process_vm_readv; ``""`` when it can.
    own_read_problem: str
    gpus: tuple[Gpu, ...] = ()
    #: NUMA nodes with memory.
    nodes: tuple[int, ...] = (0,)
    #: Whether the kernel has a module by which ``ibv_reg_mr`` takes GPU memory.
    has_peer_memory: bool = False
    #: Of the kernel: ``6.8.0-45-generic``; ``""`` if it is not known.
    kernel: str = ""
    #: First line of /proc/driver/nvidia/version; ``""`` without NVIDIA's driver.
    gpu_driver: str = ""
    bridges: tuple[Bridge, ...] = ()
    #: Soft limit of file descriptors, or ``UNLIMITED``.
    descriptors: int = UNLIMITED
    #: Name of the setting → most bytes that the kernel gives to the buffer of a TCP connection;
    #: None if that is not known.
    tcp_buffers: dict[str, int | None] = {}
    #: Whether the kernel encrypts TCP connections; None if that is not known.
    has_kernel_tls: bool | None = None
    has_libcrypto: bool = True
    #: ``always``, ``madvise`` or ``never``; ``""`` if it is not known.
    huge_pages: str = ""


def gather(root: Path = Path("/")) -> Facts:
    """Looks at the machine, at files below ``root``. Takes milliseconds, and moves nothing.

    Of this machine itself it opens each RDMA device, to ask for the active MTU, which sysfs does
    not have, and for the GIDs: in sysfs there are three files for each of up to 1024 entries.
    """
    machine = read_machine(root)
    capabilities = _capabilities(root / "proc/self/status")
    devices = root / "dev/infiniband"
    return Facts(
        libraries={name: _load(name) for name in ("libibverbs.so.1", "librdmacm.so.1")},
        ports=tuple(_port(root, nic) for nic in machine.nics),
        has_verbs_class=(root / "sys/class/infiniband_verbs").is_dir(),
        has_device_directory=devices.is_dir(),
        memlock_nbytes=_limit(resource.RLIMIT_MEMLOCK),
        may_lock=bool(capabilities >> _CAP_IPC_LOCK & 1),
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        may_ptrace=bool(capabilities >> _CAP_SYS_PTRACE & 1),
        own_read_problem=_read_own(),
        gpus=machine.gpus,
        nodes=machine.nodes,
        has_peer_memory=any((root / "sys/module" / one).is_dir() for one in _PEER_MEMORY_MODULES),
        kernel=_text(root / "proc/sys/kernel/osrelease"),
        gpu_driver=_text(root / "proc/driver/nvidia/version").partition("\n")[0],
        bridges=_bridges(root, machine),
        descriptors=_limit(resource.RLIMIT_NOFILE),
        tcp_buffers={name: _last_number(root, name) for name in _TCP_BUFFERS},
        has_kernel_tls=_has_tls(root / "proc/sys/net/ipv4/tcp_available_ulp"),
        has_libcrypto=has_libcrypto(),
        huge_pages=_selected(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
    )


def _load(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as exc:
        return str(exc)
    return ""


def _port(root: Path, nic: Nic) -> Port:
    problem = _open(root / "dev/infiniband", nic)
    sys = root / "sys"
    active_mtu, gids = _ask(nic) if root == Path("/") and not problem else (None, None)
    return Port(
        nic=nic,
        gids=read_gids(nic, root) if gids is None else gids,
        problem=problem,
        netdev_mtu=_number(sys / "class/net" / nic.netdev / "mtu") if nic.netdev else None,
        active_mtu=active_mtu,
        iommu=_text(sys / "bus/pci/devices" / nic.pci[-1] / "iommu_group/type") if nic.pci else "",
        has_ecn=_has_ecn(sys / "class/net" / nic.netdev / "ecn") if nic.netdev else None,
    )


def _open(devices: Path, nic: Nic) -> str:
    path = devices / nic.uverbs
    if not nic.uverbs:
        return "it has no verbs device"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _ask(nic: Nic) -> tuple[int | None, tuple[Gid, ...] | None]:
    """Active MTU and GIDs, as the device tells them. None for what it does not tell, and for both
    of a device that libibverbs does not open; test writes then tell why."""
    with contextlib.suppress(OSError):
        verbs.load()
        device = verbs.Device(nic.device)
        try:
            active_mtu = 1 << _MTU_MIN_LOG2 + device.port(nic.port)[1]
            return active_mtu, None if device.is_iwarp else read_device_gids(nic, device)
        finally:
            device.close()
    return None, None


def _has_ecn(ecn: Path) -> bool | None:
    """Whether ECN is on, as the files of NVIDIA's driver say for each priority; None if unknown."""
    switches = [_text(path) for path in ecn.glob("roce_[nr]p/enable/[0-7]")]
    return any(text == "1" for text in switches) if switches else None


def _bridges(root: Path, machine: Machine) -> tuple[Bridge, ...]:
    """The PCI bridges on the way to a NIC or a GPU."""
    chains = [nic.pci for nic in machine.nics] + [gpu.pci for gpu in machine.gpus]
    addresses = sorted({address for chain in chains for address in chain[1:-1]})
    return tuple(
        Bridge(one, acs_redirects(_bytes(root / "sys/bus/pci/devices" / one / "config")))
        for one in addresses
    )


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _capabilities(status: Path) -> int:
    lines = _text(status).splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _has_tls(ulps: Path) -> bool | None:
    text = _text(ulps)
    return "tls" in text.split() if text or ulps.exists() else None


def _last_number(root: Path, setting: str) -> int | None:
    words = _text(root / "proc/sys" / setting.replace(".", "/")).split()
    return int(words[-1]) if words else None


def _selected(text: str) -> str:
    """``madvise`` of ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text else None


def _text(path: Path) -> str:
    """Its content; empty when there is none, or none for this process."""
    return _bytes(path).decode(errors="replace").strip()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise  # it may be there
        return b""


def _read_own() -> str:
    sample = ctypes.create_string_buffer(b"te doctor")
    try:
        read_process(os.getpid(), ctypes.addressof(sample), len(sample))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""
