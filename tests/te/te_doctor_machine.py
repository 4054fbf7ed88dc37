# SPDX-License-Identifier: Apache-2.0
"""Machines for the doctor's rules: one on which everything is possible, and what is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from te_sysfs import V1, V2, Sysfs

from te.doctor import Facts, Port
from te.doctor.facts import UNLIMITED
from te.topology import read_gids, read_machine

__all__ = ["ports", "well"]

#: Fields of ``Port`` that no file of ``Sysfs`` stands for.
OF_PORTS = {"problem", "netdev_mtu", "active_mtu", "iommu", "has_ecn"}


def ports(root: Path, **changes: Any) -> tuple[Port, ...]:
    """Two RoCE NICs as they should be, the second one changed: arguments of ``Sysfs.nic`` and
    fields of ``Port``."""
    tree = Sysfs(root)
    own = {name: changes.pop(name) for name in set(changes) & OF_PORTS}
    for i in (0, 1):
        gids = [("fe80::1", V1), (f"::ffff:10.1.0.{i + 1}", V2)]
        one: dict[str, Any] = {"link_layer": "Ethernet", "netdev": f"eth{i}", "gids": gids}
        tree.nic(f"mlx5_{i}", None, **{**one, **(changes if i else {})})
    found = []
    for nic in read_machine(root).nics:
        fields: dict[str, Any] = {"problem": "", "netdev_mtu": 9000, "active_mtu": 4096}
        if nic.name == "mlx5_1":
            fields |= own
        found.append(Port(nic=nic, gids=read_gids(nic, root), **fields))
    return tuple(found)


def well(root: Path) -> Facts:
    """A machine on which everything is possible."""
    return Facts(
        libraries={"libibverbs.so.1": "", "librdmacm.so.1": ""},
        ports=ports(root),
        has_verbs_class=True,
        has_device_directory=True,
        memlock_nbytes=UNLIMITED,
        may_lock=False,
        ptrace_scope=1,
        may_ptrace=False,
        own_read_problem="",
        kernel="6.8.0-45-generic",
        has_kernel_tls=True,
        huge_pages="madvise",
        tcp_buffers={"net.ipv4.tcp_rmem": 6 << 20, "net.ipv4.tcp_wmem": 4 << 20},
    )
