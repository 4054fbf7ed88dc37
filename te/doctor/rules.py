# SPDX-License-Identifier: Apache-2.0
"""From facts to sentences. Pure.

A finding blocks its transport, or limits it: then it works, but worse or not everywhere. Only the
first thing that blocks is told where the rest follows from it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Final

import msgspec

from te.doctor.facts import UNLIMITED, Facts, Port
from te.topology import GidKind

__all__ = ["Finding", "findings", "possible", "usable_nics"]

# A KV cache is tens of GiB; below this limit not even a test's pools can be registered.
_LOCKABLE_FEW: Final = 1 << 30


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it should be, and what to do."""

    transport: str
    blocks: bool
    #: One sentence: what is wrong, and after the semicolon the fix.
    text: str


def findings(facts: Facts) -> tuple[Finding, ...]:
    """Everything there is to say, transport by transport; nothing when all is well."""
    return (*_samehost(facts), *_rdma(facts))


def possible(transport: str, found: tuple[Finding, ...]) -> bool:
    """Whether nothing blocks it."""
    return not any(one.blocks and one.transport == transport for one in found)


def usable_nics(facts: Facts) -> tuple[str, ...]:
    """Names of the NICs that carry data."""
    return tuple(port.nic.name for port in facts.ports if not _port_trouble(port))


def _samehost(facts: Facts) -> Iterator[Finding]:
    if facts.own_read_problem:
        yield _blocks(
            "samehost",
            f"process_vm_readv is refused ({facts.own_read_problem}), as by a container's seccomp"
            " profile; allow it there, or accept TCP between processes of this host",
        )
    scope = facts.ptrace_scope
    if scope is not None and scope >= 2 and not (scope == 2 and facts.may_ptrace):
        cure = (
            "set it to 1 (sysctl kernel.yama.ptrace_scope=1) or grant CAP_SYS_PTRACE"
            if scope == 2
            else "set it below 3 in /etc/sysctl.d and reboot, since 3 cannot be taken back"
        )
        yield _blocks(
            "samehost",
            f"kernel.yama.ptrace_scope is {scope}, so no process may read another's memory; {cure}",
        )


def _rdma(facts: Facts) -> Iterator[Finding]:
    problem = facts.libraries["libibverbs.so.1"]
    if problem:
        yield _blocks(
            "rdma",
            f"libibverbs cannot be loaded ({problem}); install it:"
            " apt-get install libibverbs1 ibverbs-providers (other systems: rdma-core)",
        )
    if not facts.ports:
        yield _blocks(
            "rdma",
            "the kernel shows no RDMA device in /sys/class/infiniband; load the driver of the card"
            " (mlx5_ib, bnxt_re, …), or for a trial: rdma link add rxe0 type rxe netdev eth0",
        )
        return
    if not facts.has_verbs_class:
        yield _blocks(
            "rdma", "the kernel's ib_uverbs module is not loaded; load it: modprobe ib_uverbs"
        )
        return
    if not facts.has_device_directory:
        yield _blocks(
            "rdma",
            "there are RDMA devices but no /dev/infiniband; in a container start it with"
            " --device=/dev/infiniband (Kubernetes: an RDMA device plug-in)",
        )
        return
    yield from _ports(facts.ports)
    yield from _connection_manager(facts)
    yield from _locked_memory(facts)


def _ports(ports: tuple[Port, ...]) -> Iterator[Finding]:
    troubles = [(port, _port_trouble(port)) for port in ports]
    usable = any(not trouble for _, trouble in troubles)
    for port, trouble in troubles:
        if trouble:
            yield Finding("rdma", not usable, trouble)
        elif weakness := _gid_weakness(port):
            yield Finding("rdma", False, weakness)


def _port_trouble(port: Port) -> str:
    """Why it carries nothing; empty if it may."""
    nic = port.nic
    if port.problem:
        is_absent = port.problem == os.strerror(errno.ENOENT)
        return (
            f"{nic.name}: /dev/infiniband/{nic.uverbs or 'uverbs*'} cannot be opened"
            f" ({port.problem}); "
            + (
                "in a container start it with --device=/dev/infiniband"
                if is_absent
                else "give this user read and write permission for it"
            )
        )
    if not nic.is_active:
        if nic.state == "INIT" and nic.link_layer == "InfiniBand":
            return f"{nic.name}: its port is INIT; start a subnet manager in this fabric (opensm)"
        up = f"run ip link set {nic.netdev} up and check the cable" if nic.netdev else ""
        return f"{nic.name}: its port is {nic.state}; {up or 'check the cable and the switch'}"
    if not port.gids:
        cure = f"give {nic.netdev} an address" if nic.netdev else "give its interface an address"
        return f"{nic.name}: its port has no GID; {cure}: ip address add …"
    return ""


def _gid_weakness(port: Port) -> str:
    """Why only few peers can be reached by it; empty if that cannot be seen from here."""
    nic, netdev = port.nic, port.nic.netdev or "its interface"
    roce = [gid for gid in port.gids if gid.roce]
    if not roce:
        return ""
    modern = [gid for gid in roce if gid.roce == 2]
    if not modern:
        return (
            f"{nic.name}: it has RoCE v1 GIDs alone, which no router passes; set RoCE v2"
            " (cma_roce_mode, or the card's firmware)"
        )
    routable = [gid for gid in modern if gid.kind is not GidKind.LINK_LOCAL]
    if not routable:
        return (
            f"{nic.name}: its only GID is link-local, which reaches no other network; give"
            f" {netdev} an IP address: ip address add …"
        )
    if all(gid.is_overlay for gid in routable):
        return (
            f"{nic.name}: its GIDs belong to container networks ({routable[0].netdev}), which other"
            f" hosts may not reach; give {netdev} an address of the RDMA network"
        )
    return ""


def _connection_manager(facts: Facts) -> Iterator[Finding]:
    problem = facts.libraries["librdmacm.so.1"]
    iwarp = [port.nic.name for port in facts.ports if port.nic.kind == "RNIC"]
    if problem and iwarp:
        yield Finding(
            "rdma",
            len(iwarp) == len(facts.ports),
            f"{', '.join(iwarp)} (iWARP) need librdmacm, which cannot be loaded ({problem});"
            " install it: apt-get install librdmacm1",
        )


def _locked_memory(facts: Facts) -> Iterator[Finding]:
    limit = facts.memlock_nbytes
    if limit == UNLIMITED or facts.may_lock:
        return
    text = (
        f"this process may lock {_size(limit)} of memory, and registering more fails; raise it:"
        " ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)"
    )
    yield Finding("rdma", limit < _LOCKABLE_FEW, text)


def _blocks(transport: str, text: str) -> Finding:
    return Finding(transport, True, text)


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes >> 10} KiB"
