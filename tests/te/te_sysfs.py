# SPDX-License-Identifier: Apache-2.0
"""The parts of sysfs that ``te.topology`` reads, laid out as on machines that are typical."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Sysfs", "dgx_h100", "one_socket", "two_sockets"]

V1, V2 = "IB/RoCE v1", "RoCE v2"


class Sysfs:
    """Writes a tree below ``root``, with the relative links that the kernel makes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sys = root / "sys"
        self._uverbs = 0

    def node(self, number: int) -> None:
        (self.sys / f"devices/system/node/node{number}").mkdir(parents=True)

    def pci(self, chain: str, numa: int, **files: str) -> Path:
        """A PCI device at ``pci0000:15/0000:15:01.0/…``."""
        place = self.sys / "devices" / chain
        self._write(place, numa_node=str(numa), **files)
        self._link(self.sys / "bus/pci/devices" / place.name, place)
        return place

    def gpu(self, chain: str, numa: int) -> None:
        """An H100 SXM."""
        self.pci(chain, numa, **{"class": "0x030200", "vendor": "0x10de", "device": "0x2330"})

    def nic(
        self,
        name: str,
        chain: str | None,
        numa: int = -1,
        *,
        ports: Sequence[str] = ("4: ACTIVE",),
        link_layer: str = "InfiniBand",
        rate: str = "400 Gb/sec (4X NDR)",
        node_type: str = "1: CA",
        netdev: str = "",
        gids: Sequence[tuple[str, str]] = (("fe80::a288:c203:0:1234", V1),),
    ) -> None:
        """An RDMA device; without a PCI path, one made of the interface ``netdev`` in software."""
        if chain is None:
            place = self.sys / "devices/virtual/infiniband" / name
        else:
            parent = self.pci(chain, numa, **{"class": "0x020700", "vendor": "0x15b3"})
            place = parent / "infiniband" / name
            self._link(place / "device", parent)
        self._write(place, node_type=node_type)
        for number, state in enumerate(ports, 1):
            port = place / "ports" / str(number)
            self._write(port, state=state, link_layer=link_layer, rate=rate)
            for index, (gid, kind) in enumerate(gids):
                self._write(port / "gids", **{str(index): gid})
                self._write(port / "gid_attrs/types", **{str(index): kind})
                self._write(port / "gid_attrs/ndevs", **{str(index): netdev})
            self._write(port / "gids", **{str(len(gids)): "0000:" * 7 + "0000"})
        self._link(self.sys / "class/infiniband" / name, place)
        self._write(self.sys / f"class/infiniband_verbs/uverbs{self._uverbs}", ibdev=name)
        self._uverbs += 1

    def netdev(self, name: str, chain: str) -> None:
        """A network interface of the PCI device at ``chain``."""
        place = self.sys / "devices" / chain / "net" / name
        self._write(place, dev_port="0")
        self._link(place / "device", self.sys / "devices" / chain)
        self._link(self.sys / "class/net" / name, place)

    def _write(self, place: Path, **files: str) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text + "\n")

    def _link(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))


def dgx_h100(root: Path) -> Path:
    """Eight GPUs, each behind one PCIe switch with its ConnectX-7, and two storage NICs.

    Bus numbers of the NICs and their device names are those of NVIDIA's DGX H100 user guide, table
    of network modules; the bridges above are laid out as such switches are.
    """
    tree = Sysfs(root)
    pairs = [
        ("18", "mlx5_0", "1b"),
        ("40", "mlx5_3", "43"),
        ("4f", "mlx5_4", "52"),
        ("5e", "mlx5_5", "61"),
        ("9a", "mlx5_6", "9d"),
        ("c0", "mlx5_9", "c3"),
        ("ce", "mlx5_10", "d1"),
        ("dc", "mlx5_11", "df"),
    ]
    for node in (0, 1):
        tree.node(node)
    for i, (nic, name, gpu) in enumerate(pairs):
        base = int(nic, 16) - 3
        switch = (
            f"pci0000:{base:02x}/0000:{base:02x}:01.0/0000:{base + 1:02x}:00.0/0000:{base + 2:02x}:"
        )
        tree.nic(name, f"{switch}00.0/0000:{nic}:00.0", i // 4)
        tree.gpu(f"{switch}04.0/0000:{gpu}:00.0", i // 4)
    for node, bus, names in ((0, "29", ("mlx5_1", "mlx5_2")), (1, "aa", ("mlx5_7", "mlx5_8"))):
        for function, name in enumerate(names):
            chain = f"pci0000:{bus}/0000:{bus}:01.0/0000:{bus}:00.{function}"
            tree.nic(name, chain, node)
    return root


def two_sockets(root: Path) -> Path:
    """One RoCE NIC with two ports at each socket, and two GPUs, each at a root port of its own."""
    tree = Sysfs(root)
    for node, bus in enumerate(("17", "b1")):
        tree.node(node)
        tree.nic(
            f"mlx5_{node}",
            f"pci0000:{bus}/0000:{bus}:00.0/0000:{int(bus, 16) + 1:02x}:00.0",
            node,
            ports=("4: ACTIVE", "1: DOWN"),
            link_layer="Ethernet",
            rate="100 Gb/sec (4X EDR)",
            netdev=f"ens{node}f0np0",
            gids=(
                ("fe80::ac0:ebff:fe00:1", V1),
                ("fe80::ac0:ebff:fe00:1", V2),
                (f"::ffff:192.168.0.{node + 1}", V1),
                (f"::ffff:192.168.0.{node + 1}", V2),
            ),
        )
        tree.gpu(f"pci0000:{bus}/0000:{bus}:02.0/0000:{int(bus, 16) + 9:02x}:00.0", node)
    return root


def one_socket(root: Path) -> Path:
    """A small machine without NUMA: soft-RoCE on its Ethernet card, soft-iWARP on nothing."""
    tree = Sysfs(root)
    card = "pci0000:00/0000:00:03.0"
    tree.pci(card, -1, **{"class": "0x020000", "vendor": "0x8086"})
    tree.pci("pci0000:00/0000:00:02.0", -1, **{"class": "0x030000", "vendor": "0x8086"})
    tree.netdev("eth0", card)
    tree.nic(
        "rxe0",
        None,
        link_layer="Ethernet",
        rate="10 Gb/sec (1X FDR10)",
        netdev="eth0",
        gids=(("fe80::5054:ff:fe12:3456", V2), ("::ffff:10.0.0.5", V2)),
    )
    tree.nic(
        "siw0",
        None,
        link_layer="Ethernet",
        rate="10 Gb/sec (1X FDR10)",
        node_type="4: RNIC",
        netdev="dummy0",
        gids=(("82c5:29cf:c3ba::", V1),),
    )
    return root
