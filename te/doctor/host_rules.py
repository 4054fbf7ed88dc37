# SPDX-License-Identifier: Apache-2.0
"""What facts mean for GPUs, PCI and the host's settings. Pure. What is not known gives no finding:
``unknown`` names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from te.doctor.catalogue import CATALOGUE
from te.doctor.facts import UNLIMITED, Facts
from te.doctor.findings import Seen
from te.topology.locality import Link, link

__all__ = ["dma_buf_problem", "see_host", "size_text", "unknown"]

_DESCRIPTORS_FEW: Final = 4096
# 100 Gbit/s times 80 us, the round trip within a data centre.
_TCP_BUFFER_FEW: Final = 1 << 20
# RoCE's packets of 4096 bytes and their headers: IBV_MTU_4096 with IPv6, UDP and BTH.
_ROCE_JUMBO: Final = 4096
_DMA_BUF_KERNEL: Final = (5, 12)
_DMA_BUF_DRIVER: Final = 515


def see_host(facts: Facts) -> Iterator[Seen]:
    """All of it; what concerns RDMA only where there are RDMA devices."""
    if facts.ports:
        yield from _ports(facts)
        if facts.gpus:
            yield from _gpus(facts)
        if facts.huge_pages == "never":
            yield _seen("hugepages-off")
    if facts.descriptors != UNLIMITED and facts.descriptors < _DESCRIPTORS_FEW:
        yield _seen("descriptors-low", limit=str(facts.descriptors))
    for name, limit in facts.tcp_buffers.items():
        if limit is not None and limit < _TCP_BUFFER_FEW:
            yield _seen("tcp-buffers-small", name, limit=size_text(limit), name=name)
    if facts.has_kernel_tls is False:
        yield _seen("kernel-tls-missing" if facts.has_libcrypto else "encryption-missing")


def _ports(facts: Facts) -> Iterator[Seen]:
    for port in facts.ports:
        nic = port.nic
        mtu, active = port.netdev_mtu, port.active_mtu
        is_roce = nic.kind == "CA" and nic.link_layer == "Ethernet"
        if is_roce and nic.is_active and mtu and active is not None and active < _ROCE_JUMBO:
            yield _seen(
                "mtu-small",
                nic.name,
                device=nic.name,
                mtu=str(mtu),
                active=str(active),
                netdev=nic.netdev,
            )
        if port.has_ecn is False:
            yield _seen("ecn-off", nic.name, device=nic.name, netdev=nic.netdev)
    translated = [port for port in facts.ports if port.iommu.startswith("DMA")]
    if translated:
        names = tuple(port.nic.name for port in translated)
        types = sorted({port.iommu for port in translated})
        yield _seen("iommu-on", *names, devices=", ".join(names), type=", ".join(types))


def _gpus(facts: Facts) -> Iterator[Seen]:
    problem = dma_buf_problem(facts)
    if problem and not facts.has_peer_memory:
        yield _seen("peermem-missing", problem=problem)
    for gpu in facts.gpus:
        links = {
            port.nic.name: link(gpu.pci, gpu.numa, port.nic.pci, port.nic.numa)
            for port in facts.ports
        }
        if min(links.values()) is Link.SYS:
            name = f"cuda:{gpu.index}"
            nics = ", ".join(links)
            values = {"gpu": name, "address": gpu.address, "nics": nics, "numa": str(gpu.numa)}
            yield _seen("nic-far-from-gpu", name, **values)
    bridges = tuple(one.address for one in facts.bridges if one.redirects)
    if bridges:
        yield _seen("acs-on", *bridges, bridges=", ".join(bridges), bridge=bridges[0])


def dma_buf_problem(facts: Facts) -> str | None:
    """Why NVIDIA's GPU memory cannot be had as a dma-buf; ``""`` if it can, None if that is not
    known.

    That takes the driver's open kernel modules, R515 or later, and Linux 5.12 (NVIDIA, GPUDirect
    RDMA).
    """
    driver = re.search(r"Kernel Module(?: +for \S+)? +(\d+)\.", facts.gpu_driver)
    kernel = re.match(r"(\d+)\.(\d+)", facts.kernel)
    if driver is None or kernel is None:
        return None
    if (int(kernel[1]), int(kernel[2])) < _DMA_BUF_KERNEL:
        return f"Linux {facts.kernel} is older than 5.12"
    if "Open Kernel Module" not in facts.gpu_driver:
        return "the driver's kernel modules are not the open ones"
    if int(driver[1]) < _DMA_BUF_DRIVER:
        return f"the driver's version {driver[1]} is older than 515"
    return ""


def unknown(facts: Facts) -> tuple[str, ...]:
    """What could not be found out, a phrase each."""
    found = []
    hidden = [one.address for one in facts.bridges if one.redirects is None]
    if hidden and facts.gpus:
        found.append(
            f"ACS of {len(hidden)} PCI bridges: root alone can read it (lspci -vvv shows ACSCtl)"
        )
    if facts.gpus and facts.ports and dma_buf_problem(facts) is None:
        found.append("dma-buf: the GPU driver does not tell its version")
    ethernet = [port for port in facts.ports if port.nic.link_layer == "Ethernet"]
    if any(port.nic.pci and port.nic.kind == "CA" for port in ethernet):
        found.append("PFC of RoCE ports and their switches: dcb pfc show dev INTERFACE, mlnx_qos")
    no_ecn = [port.nic.name for port in ethernet if port.has_ecn is None and port.nic.pci]
    if no_ecn:
        found.append(f"ECN of {', '.join(no_ecn)}: the driver has no files for it")
    if facts.has_kernel_tls is None:
        found.append("whether the kernel can encrypt TCP connections (tcp_available_ulp)")
    found += [
        f"{name}: it cannot be read" for name, one in facts.tcp_buffers.items() if one is None
    ]
    if facts.ports and not facts.huge_pages:
        found.append("transparent huge pages: this kernel does not tell")
    return tuple(found)


def size_text(nbytes: int) -> str:
    """``64 KiB``, ``1.5 GiB``."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes >> 10} KiB"


def _seen(kind: str, *where: str, **values: str) -> Seen:
    return Seen(kind=CATALOGUE[kind], where=where, values=values)
