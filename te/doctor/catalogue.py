# SPDX-License-Identifier: Apache-2.0
"""Everything that ``te doctor`` can find, in the order of docs/doctor.md, whose table is made of
it. Places in braces are filled in by whoever finds it (``rules.py``, ``host_rules.py``,
``outcome.py``)."""

from __future__ import annotations

from typing import Final

from te.doctor.findings import Kind, Severity

__all__ = ["CATALOGUE"]

_MISSING: Final = "RDMA cannot be used; te falls back to TCP between hosts."
_DEVICE: Final = (
    "te uses the other RDMA devices, if there are any; without one it falls back to TCP."
)
_FAR_PEERS: Final = "RDMA reaches only peers in the same network through {device}."

RDMA: Final = (
    Kind(
        name="rdma-device-missing",
        transport="rdma",
        severity=Severity.HINT,
        unasked=Severity.HINT,
        what="The kernel shows no RDMA device in /sys/class/infiniband.",
        consequence=_MISSING,
        mend="Load the driver of the card (modprobe mlx5_ib, bnxt_re, …); for a trial without a"
        " card: rdma link add rxe0 type rxe netdev eth0",
    ),
    Kind(
        name="libibverbs-missing",
        transport="rdma",
        severity=Severity.ERROR,
        what="libibverbs cannot be loaded ({problem}).",
        consequence=_MISSING,
        mend="apt-get install libibverbs1 ibverbs-providers (other systems: rdma-core)",
    ),
    Kind(
        name="librdmacm-missing",
        transport="rdma",
        severity=Severity.WARNING,
        what="librdmacm, which iWARP devices ({devices}) need, cannot be loaded ({problem}).",
        consequence="te cannot use these devices.",
        mend="apt-get install librdmacm1",
    ),
    Kind(
        name="uverbs-missing",
        transport="rdma",
        severity=Severity.ERROR,
        what="There are RDMA devices, but the kernel module ib_uverbs is not loaded.",
        consequence=_MISSING,
        mend="modprobe ib_uverbs",
    ),
    Kind(
        name="dev-infiniband-missing",
        transport="rdma",
        severity=Severity.ERROR,
        what="There are RDMA devices, but no directory /dev/infiniband.",
        consequence=_MISSING,
        mend="In a container: start it with --device=/dev/infiniband (Kubernetes: an RDMA device"
        " plug-in)",
    ),
    Kind(
        name="device-refused",
        transport="rdma",
        severity=Severity.WARNING,
        what="{path}, the file of {device}, cannot be opened ({problem}).",
        consequence=_DEVICE,
        mend="{mend}",
    ),
    Kind(
        name="port-down",
        transport="rdma",
        severity=Severity.WARNING,
        what="The port of {device} is {state}.",
        consequence=_DEVICE,
        mend="{mend}",
    ),
    Kind(
        name="subnet-manager-missing",
        transport="rdma",
        severity=Severity.WARNING,
        what="The InfiniBand port of {device} has a link, but no subnet manager has configured it"
        " (state {state}).",
        consequence=_DEVICE,
        mend="Start a subnet manager in the fabric: systemctl start opensm",
    ),
    Kind(
        name="gid-missing",
        transport="rdma",
        severity=Severity.WARNING,
        what="The port of {device} has no GID.",
        consequence=_DEVICE,
        mend="ip address add ADDRESS/PREFIX dev {netdev}",
    ),
    Kind(
        name="gid-forced-missing",
        transport="rdma",
        severity=Severity.WARNING,
        what="GID index {index} was asked for, and entry {index} of {device} is no RoCE v2 GID; it"
        " has {there}.",
        consequence=_DEVICE,
        mend="Leave the GID index out, so that te probes all of them, or give one of these",
    ),
    Kind(
        name="gid-v1-only",
        transport="rdma",
        severity=Severity.WARNING,
        what="{device} has only RoCE v1 GIDs.",
        consequence=_DEVICE,
        mend="cma_roce_mode -d {device} -p 1 -m 2, or enable RoCE v2 in the card's firmware",
    ),
    Kind(
        name="gid-link-local",
        transport="rdma",
        severity=Severity.WARNING,
        what="{device} has no GID but a link-local one.",
        consequence=_FAR_PEERS,
        mend="ip address add ADDRESS/PREFIX dev {netdev}",
    ),
    Kind(
        name="gid-overlay",
        transport="rdma",
        severity=Severity.WARNING,
        what="All GIDs of {device} belong to a container network ({overlay}).",
        consequence="Other hosts may not reach {device}.",
        mend="Give {netdev} an address of the RDMA network: ip address add ADDRESS/PREFIX dev"
        " {netdev}",
    ),
    Kind(
        name="memlock-low",
        transport="rdma",
        severity=Severity.WARNING,
        what="This process may lock {limit} of memory.",
        consequence="Registering more memory than that with an RDMA device fails.",
        mend="ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, docker: --ulimit memlock=-1)",
    ),
    Kind(
        name="mtu-mixed",
        transport="rdma",
        severity=Severity.WARNING,
        what="Ports of one network have different MTUs: {mtus}.",
        consequence="Each pair of ports uses the smaller MTU of the two, which costs throughput, or"
        " loses large packets if a switch has a smaller one.",
        mend="Give all ports and switches one MTU: ip link set {netdev} mtu {largest}",
    ),
    Kind(
        name="mtu-small",
        transport="rdma",
        severity=Severity.HINT,
        what="The interface of {device} has an MTU of {mtu}, so RoCE uses packets of {active}"
        " bytes.",
        consequence="Packets of 4096 bytes cost less per byte.",
        mend="ip link set {netdev} mtu 4200, if all switches between the hosts allow it",
    ),
    Kind(
        name="ecn-off",
        transport="rdma",
        severity=Severity.HINT,
        what="Congestion control (ECN) is off for all priorities of {device}.",
        consequence="When several hosts send to one, packets are lost and RDMA rates collapse.",
        mend="echo 1 > /sys/class/net/{netdev}/ecn/roce_np/enable/PRIORITY (and roce_rp)",
    ),
    Kind(
        name="hugepages-off",
        transport="rdma",
        severity=Severity.HINT,
        what="Transparent huge pages are off.",
        consequence="Registering host memory takes longer; GPU memory is not concerned.",
        mend="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    ),
)

GPU: Final = (
    Kind(
        name="peermem-missing",
        transport="rdma",
        severity=Severity.WARNING,
        what="There are GPUs and RDMA devices, but nvidia-peermem is not loaded, and dma-buf is not"
        " to be had ({problem}).",
        consequence="RDMA devices cannot reach GPU memory, so GPU memory is copied through host"
        " memory and TCP.",
        mend="modprobe nvidia-peermem, or install the driver's open kernel modules (R515 or later)"
        " under Linux 5.12 or later",
    ),
    Kind(
        name="nic-far-from-gpu",
        transport="rdma",
        severity=Severity.WARNING,
        what="The nearest RDMA device of {gpu} ({address}) is behind another socket: {nics}.",
        consequence="Transfers of {gpu} cross the link between the sockets, which is slower.",
        mend="Put a NIC into a slot of NUMA node {numa}, or start the server on GPUs that have one"
        " (te topology shows them)",
    ),
    Kind(
        name="iommu-on",
        transport="rdma",
        severity=Severity.HINT,
        what="The IOMMU translates addresses of {devices} (type {type}).",
        consequence="Registering memory takes longer, and traffic between a NIC and a GPU may take"
        " the way through the processor.",
        mend="Boot with iommu=pt on the kernel's command line, or switch the IOMMU off in the BIOS",
    ),
    Kind(
        name="acs-on",
        transport="rdma",
        severity=Severity.HINT,
        what="PCI bridges between GPUs and RDMA devices redirect peer-to-peer traffic (ACS):"
        " {bridges}.",
        consequence="Traffic between a GPU and a NIC at one switch takes the way through the"
        " processor, at a fraction of the rate.",
        mend="setpci -s {bridge} ECAP_ACS+0x6.w=0000 for each of them after every boot (not with"
        " virtual machines that need ACS), or switch ACS off in the BIOS",
    ),
)

HOST: Final = (
    Kind(
        name="process-read-refused",
        transport="samehost",
        severity=Severity.WARNING,
        unasked=Severity.WARNING,
        what="The system call process_vm_readv is refused ({problem}), as by a container's seccomp"
        " profile.",
        consequence="Processes of this host exchange data over TCP, which is slower.",
        mend="docker: --cap-add=SYS_PTRACE, or --security-opt seccomp=PROFILE with a profile that"
        " allows process_vm_readv",
    ),
    Kind(
        name="ptrace-restricted",
        transport="samehost",
        severity=Severity.WARNING,
        unasked=Severity.WARNING,
        what="kernel.yama.ptrace_scope is {scope}, so no process may read the memory of another.",
        consequence="Processes of this host exchange data over TCP, which is slower.",
        mend="{mend}",
    ),
    Kind(
        name="descriptors-low",
        transport="",
        severity=Severity.HINT,
        what="This process may open {limit} file descriptors.",
        consequence="An engine needs some for every peer, and refuses peers beyond that.",
        mend="ulimit -n 65536 (systemd: LimitNOFILE=65536, docker: --ulimit nofile=65536)",
    ),
    Kind(
        name="tcp-buffers-small",
        transport="tcp",
        severity=Severity.HINT,
        what="The kernel lets a TCP connection have {limit} of buffer ({name}).",
        consequence="A connection over a fast or distant network does not reach its full rate.",
        mend="sysctl -w {name}='4096 131072 16777216'",
    ),
    Kind(
        name="kernel-tls-missing",
        transport="tcp",
        severity=Severity.HINT,
        what="The kernel's module tls is not loaded.",
        consequence="If encryption is switched on, libcrypto does it, which costs one more copy.",
        mend="modprobe tls",
    ),
    Kind(
        name="encryption-missing",
        transport="tcp",
        severity=Severity.WARNING,
        what="Neither the kernel's module tls nor libcrypto of OpenSSL 3 is there.",
        consequence="An engine that is told to encrypt does not start.",
        mend="apt-get install libssl3",
    ),
)

WRITES: Final = (
    Kind(
        name="loopback-failed",
        transport="",
        severity=Severity.WARNING,
        what="A test write from this process to another one of this host failed over {way}:"
        " {problem}.",
        consequence="Transfers over {way} will fail, too.",
        mend="Mend what the message says; te doctor --json has all that was found",
    ),
    Kind(
        name="rail-unreachable",
        transport="",
        severity=Severity.WARNING,
        what="{here} cannot connect to {there}: {problem}.",
        consequence="te does not use this pair; pairs that work carry its share.",
        mend="Check routes, VLANs and firewalls between the two: ping -I {source} {target}",
    ),
    Kind(
        name="peer-unreachable",
        transport="",
        severity=Severity.ERROR,
        what="No way from {near} to {far} works over {transport}; the first, {here} to {there}:"
        " {problem}.",
        consequence="The two hosts cannot use this transport with each other.",
        mend="Check routes, VLANs and firewalls between the two: ping -I {source} {target}",
    ),
    Kind(
        name="rails-isolated",
        transport="rdma",
        severity=Severity.HINT,
        what="Each RDMA device of {near} reaches only its counterpart of {far}, as in a fabric of"
        " separate rails.",
        consequence="When a device of one host fails, its counterpart of the other host is idle.",
        mend="None is needed if the fabric is built so; routes between the rails would join them",
    ),
    Kind(
        name="address-unreachable",
        transport="",
        severity=Severity.HINT,
        what="{here} cannot reach {there} over TCP: {problem}.",
        consequence="A server that puts this address on its card cannot be reached from here.",
        mend="Have the server announce an address that works (te.Config.host)",
    ),
    Kind(
        name="networks-differ",
        transport="rdma",
        severity=Severity.ERROR,
        what="{here} has {here_kinds} devices and {there} has {there_kinds} devices.",
        consequence="No RDMA device of one host can connect to one of the other; te falls back to"
        " TCP.",
        mend="Use devices of one kind on both hosts",
    ),
    Kind(
        name="large-writes-lost",
        transport="",
        severity=Severity.WARNING,
        what="Small writes from {here} to {there} arrive, and large ones do not: {problem}.",
        consequence="Transfers by this pair stall and fail.",
        mend="A switch on the way probably has a smaller MTU than the ports: raise it there, or"
        " lower it here: ip link set {netdev} mtu 1500",
    ),
    Kind(
        name="bytes-wrong",
        transport="",
        severity=Severity.WARNING,
        what="Bytes that were written from {here} to {there} arrived changed.",
        consequence="Results computed from transferred data are wrong.",
        mend="Leave the device out (--disaggregation-ib-device), and have it replaced",
    ),
    Kind(
        name="versions-differ",
        transport="",
        severity=Severity.WARNING,
        what="This host runs sglang-mooncake {here}, {host} runs {there}.",
        consequence="Engines of different protocol versions do not connect.",
        mend="Install the same version on both hosts: pip install sglang-mooncake=={version}",
    ),
)

CATALOGUE: Final = {kind.name: kind for kind in (*RDMA, *GPU, *HOST, *WRITES)}
"""All kinds of findings by their names."""
