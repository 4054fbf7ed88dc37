# SPDX-License-Identifier: Apache-2.0
"""What decides about transports, as found on this machine. Looks, and changes nothing."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import msgspec

from te.topology import Gid, Nic, read_gids, read_machine
from te.transports.samehost._core import read_process

__all__ = ["UNLIMITED", "Facts", "Port", "gather"]

UNLIMITED = -1

# Bits of CapEff in /proc/self/status; linux/capability.h.
_CAP_IPC_LOCK = 14
_CAP_SYS_PTRACE = 19


class Port(msgspec.Struct, frozen=True, kw_only=True):
    """An RDMA port, and whether this process may use its device."""

    nic: Nic
    gids: tuple[Gid, ...]
    #: Why its file in /dev/infiniband cannot be opened; ``""`` when it can.
    problem: str


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


def gather(root: Path = Path("/")) -> Facts:
    """Looks at the machine, at files below ``root``."""
    nics = read_machine(root).nics
    capabilities = _capabilities(root / "proc/self/status")
    devices = root / "dev/infiniband"
    return Facts(
        libraries={name: _load(name) for name in ("libibverbs.so.1", "librdmacm.so.1")},
        ports=tuple(
            Port(nic=nic, gids=read_gids(nic, root), problem=_open(devices, nic)) for nic in nics
        ),
        has_verbs_class=(root / "sys/class/infiniband_verbs").is_dir(),
        has_device_directory=devices.is_dir(),
        memlock_nbytes=_memlock(),
        may_lock=bool(capabilities >> _CAP_IPC_LOCK & 1),
        ptrace_scope=_number(root / "proc/sys/kernel/yama/ptrace_scope"),
        may_ptrace=bool(capabilities >> _CAP_SYS_PTRACE & 1),
        own_read_problem=_read_own(),
    )


def _load(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as exc:
        return str(exc)
    return ""


def _open(devices: Path, nic: Nic) -> str:
    path = devices / nic.uverbs
    if not nic.uverbs:
        return "it has no verbs device"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _capabilities(status: Path) -> int:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except OSError:
        return None


def _read_own() -> str:
    sample = ctypes.create_string_buffer(b"te doctor")
    try:
        read_process(os.getpid(), ctypes.addressof(sample), len(sample))
    except OSError as exc:
        return exc.strerror or str(exc)
    return ""
