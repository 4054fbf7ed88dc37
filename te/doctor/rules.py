# SPDX-License-Identifier: Apache-2.0
"""What facts mean for transports. Pure. What they mean for GPUs and the host: ``host_rules.py``.

A finding blocks its transport, or limits it: then it works, but worse or not everywhere. Only the
first thing that blocks is told where the rest follows from it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from typing import Final

from te.doctor.catalogue import CATALOGUE
from te.doctor.facts import UNLIMITED, Facts, Port
from te.doctor.findings import Finding, Seen, judge
from te.doctor.host_rules import see_host, size_text
from te.topology import GidKind

__all__ = ["findings", "possible", "see_mixed_mtus", "usable_ports"]

# A KV cache is tens of GiB; below this limit not even a test's pools can be registered.
_LOCKABLE_FEW: Final = 1 << 30


def findings(
    facts: Facts, asked: Collection[str] = (), gid_index: int | None = None
) -> tuple[Finding, ...]:
    """Everything there is to say, the worst first; nothing when all is well.

    Args:
        asked: transports that have to work.
        gid_index: entry of each port's GID table that is to be used (``te.Config.gid_index``).
    """
    seen = (*_samehost(facts), *_rdma(facts, gid_index), *see_host(facts))
    return judge(seen, asked)


def possible(transport: str, found: Iterable[Finding]) -> bool:
    """Whether nothing blocks it."""
    return not any(one.blocks and one.transport == transport for one in found)


def usable_ports(facts: Facts, gid_index: int | None = None) -> tuple[Port, ...]:
    """The ports that can carry data."""
    return tuple(port for port in facts.ports if _port_trouble(port, gid_index) is None)


def _samehost(facts: Facts) -> Iterator[Seen]:
    if facts.own_read_problem:
        yield _seen("process-read-refused", blocks=True, problem=facts.own_read_problem)
    scope = facts.ptrace_scope
    if scope is not None and scope >= 2 and not (scope == 2 and facts.may_ptrace):
        mend = (
            "sysctl -w kernel.yama.ptrace_scope=1 (docker: --cap-add=SYS_PTRACE)"
            if scope == 2
            else "Set kernel.yama.ptrace_scope below 3 in /etc/sysctl.d and reboot: 3 cannot be"
            " taken back"
        )
        yield _seen("ptrace-restricted", blocks=True, scope=str(scope), mend=mend)


def _rdma(facts: Facts, gid_index: int | None) -> Iterator[Seen]:
    if not facts.ports:
        yield _seen("rdma-device-missing", blocks=True)
        return
    problem = facts.libraries["libibverbs.so.1"]
    if problem:
        yield _seen("libibverbs-missing", blocks=True, problem=problem)
    if not facts.has_verbs_class:
        yield _seen("uverbs-missing", blocks=True)
        return
    if not facts.has_device_directory:
        yield _seen("dev-infiniband-missing", blocks=True)
        return
    yield from _ports(facts.ports, gid_index)
    yield from _connection_manager(facts)
    yield from _locked_memory(facts)
    yield from see_mixed_mtus([("", port) for port in usable_ports(facts, gid_index)])


def _ports(ports: tuple[Port, ...], gid_index: int | None) -> Iterator[Seen]:
    troubles = [(port, _port_trouble(port, gid_index)) for port in ports]
    blocks = all(trouble is not None for _, trouble in troubles)
    for port, trouble in troubles:
        if trouble is not None:
            name, values = trouble
            values["device"] = port.nic.name
            yield Seen(kind=CATALOGUE[name], where=(port.nic.name,), blocks=blocks, values=values)
        elif (weakness := _gid_weakness(port)) is not None:
            name, values = weakness
            values["device"] = port.nic.name
            yield Seen(kind=CATALOGUE[name], where=(port.nic.name,), values=values)


def _port_trouble(port: Port, gid_index: int | None) -> tuple[str, dict[str, str]] | None:
    """Why it carries nothing, as a kind and its values; None if it may."""
    nic = port.nic
    netdev = nic.netdev or "INTERFACE"
    if port.problem:
        is_absent = port.problem == os.strerror(errno.ENOENT)
        mend = (
            "In a container: start it with --device=/dev/infiniband"
            if is_absent
            else f"Give this user the permission: chmod a+rw /dev/infiniband/{nic.uverbs}"
        )
        path = f"/dev/infiniband/{nic.uverbs or 'uverbs*'}"
        return "device-refused", {"path": path, "problem": port.problem, "mend": mend}
    if not nic.is_active:
        if nic.state == "INIT" and nic.link_layer == "InfiniBand":
            return "subnet-manager-missing", {"state": nic.state}
        up = f"ip link set {nic.netdev} up, and check the cable" if nic.netdev else ""
        mend = up or "Check the cable and the switch: ibstat shows the port's state"
        return "port-down", {"state": nic.state, "mend": mend}
    if not port.gids:
        return "gid-missing", {"netdev": netdev}
    roce = [gid for gid in port.gids if gid.roce == 2]
    # Without a RoCE v2 GID the index has nothing to name: that is a finding of its own.
    if gid_index is not None and roce and all(gid.index != gid_index for gid in roce):
        there = ", ".join(f"{gid.index} ({gid.text})" for gid in roce)
        return "gid-forced-missing", {"index": str(gid_index), "there": there}
    return None


def _gid_weakness(port: Port) -> tuple[str, dict[str, str]] | None:
    """Why only few peers can be reached by it; None if that cannot be seen from here."""
    netdev = port.nic.netdev or "INTERFACE"
    roce = [gid for gid in port.gids if gid.roce]
    if not roce:
        return None
    modern = [gid for gid in roce if gid.roce == 2]
    if not modern:
        return "gid-v1-only", {}
    routable = [gid for gid in modern if gid.kind is not GidKind.LINK_LOCAL]
    if not routable:
        return "gid-link-local", {"netdev": netdev}
    if all(gid.is_overlay for gid in routable):
        return "gid-overlay", {"netdev": netdev, "overlay": routable[0].netdev}
    return None


def see_mixed_mtus(ports: Iterable[tuple[str, Port]]) -> Iterator[Seen]:
    """Ports, each with the name of its host, that belong to one kind of network and have not one
    MTU. Ports whose MTU is not known are left out."""
    networks: dict[tuple[str, str], list[tuple[str, Port, int]]] = {}
    for host, port in ports:
        is_infiniband = port.nic.link_layer == "InfiniBand"
        mtu = port.active_mtu if is_infiniband else port.netdev_mtu or port.active_mtu
        if mtu is not None:
            network = (port.nic.kind, port.nic.link_layer)
            networks.setdefault(network, []).append((host, port, mtu))
    for members in networks.values():
        mtus = sorted({mtu for _, _, mtu in members}, reverse=True)
        if len(mtus) == 1:
            continue
        names = {
            mtu: " ".join(_at(host, port) for host, port, own in members if own == mtu)
            for mtu in mtus
        }
        smaller = [(host, port) for host, port, mtu in members if mtu < mtus[0]]
        yield Seen(
            kind=CATALOGUE["mtu-mixed"],
            where=tuple(_at(host, port) for host, port in smaller),
            values={
                "mtus": "; ".join(f"{mtu} ({names[mtu]})" for mtu in mtus),
                "netdev": smaller[0][1].nic.netdev or "INTERFACE",
                "largest": str(mtus[0]),
            },
        )


def _at(host: str, port: Port) -> str:
    return f"{port.nic.name}@{host}" if host else port.nic.name


def _connection_manager(facts: Facts) -> Iterator[Seen]:
    problem = facts.libraries["librdmacm.so.1"]
    iwarp = tuple(port.nic.name for port in facts.ports if port.nic.kind == "RNIC")
    if problem and iwarp:
        yield _seen(
            "librdmacm-missing",
            *iwarp,
            blocks=len(iwarp) == len(facts.ports),
            devices=", ".join(iwarp),
            problem=problem,
        )


def _locked_memory(facts: Facts) -> Iterator[Seen]:
    limit = facts.memlock_nbytes
    if limit != UNLIMITED and not facts.may_lock:
        yield _seen("memlock-low", blocks=limit < _LOCKABLE_FEW, limit=size_text(limit))


def _seen(name: str, *where: str, blocks: bool = False, **values: str) -> Seen:
    return Seen(kind=CATALOGUE[name], where=where, blocks=blocks, values=values)
