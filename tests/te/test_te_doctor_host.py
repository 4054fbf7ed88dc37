# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of GPUs, PCI and the host's settings, and what it admits not to know."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from te_doctor_machine import ports, well
from te_sysfs import dgx_h100, two_sockets

from te.doctor import Facts, Severity, findings, gather
from te.doctor.facts import Bridge
from te.doctor.host_rules import dma_buf_problem, size_text, unknown
from te.doctor.pci import acs_redirects

pytestmark = pytest.mark.pure

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023"


@pytest.fixture
def good(tmp_path: Path) -> Facts:
    return well(tmp_path / "good")


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"descriptors": 1024}, "descriptors-low", "may open 1024 file descriptors"),
        ({"huge_pages": "never"}, "hugepages-off", "are off"),
        (
            {"tcp_buffers": {"net.ipv4.tcp_wmem": 262144, "net.ipv4.tcp_rmem": None}},
            "tcp-buffers-small",
            "256 KiB of buffer (net.ipv4.tcp_wmem)",
        ),
        ({"has_kernel_tls": False}, "kernel-tls-missing", "modprobe tls"),
    ],
)
def test_settings_of_the_host_are_hints(
    good: Facts, changes: dict[str, Any], name: str, says: str
) -> None:
    (one,) = findings(structs.replace(good, **changes))
    assert (one.name, one.severity) == (name, Severity.HINT)
    assert says in one.sentence


def test_that_nobody_can_encrypt_is_a_warning(good: Facts) -> None:
    (one,) = findings(structs.replace(good, has_kernel_tls=False, has_libcrypto=False))
    assert (one.name, one.severity) == ("encryption-missing", Severity.WARNING)
    assert findings(structs.replace(good, has_kernel_tls=True, has_libcrypto=False)) == ()


def test_what_concerns_rdma_is_not_said_without_devices(good: Facts) -> None:
    facts = structs.replace(good, ports=(), huge_pages="never", bridges=(Bridge("b", True),))
    assert [one.name for one in findings(facts)] == ["rdma-device-missing"]


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"active_mtu": 1024}, "mtu-small", "packets of 1024 bytes"),
        ({"has_ecn": False}, "ecn-off", "/sys/class/net/eth1/ecn/roce_np/enable/PRIORITY"),
        ({"iommu": "DMA-FQ"}, "iommu-on", "(type DMA-FQ)"),
    ],
)
def test_hints_about_a_port_name_it(
    good: Facts, tmp_path: Path, changes: dict[str, Any], name: str, says: str
) -> None:
    (one,) = findings(structs.replace(good, ports=ports(tmp_path / "bad", **changes)))
    assert (one.name, one.where, one.severity) == (name, ("mlx5_1",), Severity.HINT)
    assert says in one.sentence


@pytest.mark.parametrize("changes", [{"iommu": "identity"}, {"has_ecn": True}, {"has_ecn": None}])
def test_ports_that_are_well(good: Facts, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert findings(structs.replace(good, ports=ports(tmp_path / "well", **changes))) == ()


# -- GPUs


@pytest.fixture
def dgx(tmp_path: Path, good: Facts) -> Facts:
    """A DGX H100 whose GPUs the NICs reach."""
    found = gather(dgx_h100(tmp_path / "dgx"))
    some = tuple(structs.replace(port, problem="") for port in found.ports)
    bridges = tuple(Bridge(one.address, False) for one in found.bridges)
    return structs.replace(
        good, ports=some, gpus=found.gpus, nodes=found.nodes, bridges=bridges, gpu_driver=OPEN
    )


def test_a_dgx_has_no_findings(dgx: Facts) -> None:
    assert findings(dgx) == ()
    assert unknown(dgx) == ()
    assert len(dgx.gpus) == 8
    assert len(dgx.bridges) > 8


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"kernel": "5.4.0"}, "Linux 5.4.0 is older than 5.12"),
        ({"kernel": "5.12.1"}, ""),
        ({"gpu_driver": CLOSED}, "the driver's kernel modules are not the open ones"),
        ({"gpu_driver": OPEN.replace("580", "510")}, "the driver's version 510 is older than 515"),
        ({"gpu_driver": ""}, None),
        ({"gpu_driver": "something else"}, None),
        ({"kernel": ""}, None),
    ],
)
def test_when_gpu_memory_can_be_had_as_a_dma_buf(
    dgx: Facts, changes: dict[str, Any], problem: str | None
) -> None:
    facts = structs.replace(dgx, **changes)
    assert dma_buf_problem(facts) == problem
    found = findings(facts)
    assert [one.name for one in found] == (["peermem-missing"] if problem else [])
    assert all(str(problem) in one.what and one.severity == "warning" for one in found)
    assert any("dma-buf" in one for one in unknown(facts)) == (problem is None)
    assert findings(structs.replace(facts, has_peer_memory=True)) == ()


def test_a_gpu_whose_nics_are_all_behind_the_other_socket(tmp_path: Path, good: Facts) -> None:
    found = gather(two_sockets(tmp_path / "two"))
    some = tuple(structs.replace(port, problem="") for port in found.ports if port.nic.numa == 0)
    facts = structs.replace(good, ports=some[:1], gpus=found.gpus, nodes=found.nodes)
    (one,) = findings(facts)
    assert (one.name, one.where, one.severity) == ("nic-far-from-gpu", ("cuda:1",), "warning")
    assert "behind another socket: mlx5_0." in one.what
    assert "NUMA node 1" in one.mend


def test_bridges_that_redirect_are_named(dgx: Facts) -> None:
    first, *others = dgx.bridges
    facts = structs.replace(dgx, bridges=(Bridge(first.address, True), *others))
    (one,) = findings(facts)
    assert (one.name, one.where, one.severity) == ("acs-on", (first.address,), Severity.HINT)
    assert f"setpci -s {first.address} ECAP_ACS+0x6.w=0000" in one.mend


def test_what_is_not_known_is_said_and_no_finding(dgx: Facts, tmp_path: Path) -> None:
    hidden = tuple(Bridge(one.address, None) for one in dgx.bridges)
    facts = structs.replace(
        dgx,
        bridges=hidden,
        has_kernel_tls=None,
        huge_pages="",
        tcp_buffers={"net.ipv4.tcp_rmem": None},
    )
    assert findings(facts) == ()
    said = "\n".join(unknown(facts))
    for part in (f"ACS of {len(hidden)} PCI bridges", "tcp_available_ulp", "huge pages", "_rmem"):
        assert part in said
    roce = gather(two_sockets(tmp_path / "roce"))
    assert "PFC of RoCE ports" in "\n".join(unknown(roce))
    assert "ECN of mlx5_0, mlx5_0:2, mlx5_1" in "\n".join(unknown(roce))


# -- gathering


def test_gathering_reads_below_the_root(tmp_path: Path) -> None:
    two_sockets(tmp_path)
    files = {
        "proc/sys/kernel/yama/ptrace_scope": "2\n",
        "proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n",
        "dev/infiniband/uverbs0": "",
        "proc/sys/kernel/osrelease": "6.1.0\n",
        "proc/driver/nvidia/version": f"{OPEN}\nGCC version: 12\n",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456\n",
        "proc/sys/net/ipv4/tcp_available_ulp": "espintcp mptcp\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/class/net/ens0f0np0/mtu": "9000\n",
        "sys/class/net/ens0f0np0/ecn/roce_np/enable/0": "0\n",
        "sys/class/net/ens0f0np0/ecn/roce_rp/enable/3": "1\n",
        "sys/bus/pci/devices/0000:18:00.0/iommu_group/type": "DMA\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0").mkdir()
    (tmp_path / "sys/bus/pci/devices/0000:17:00.0/config").write_bytes(space(0b1_0000))
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    facts = gather(tmp_path)
    assert (facts.ptrace_scope, facts.may_lock, facts.may_ptrace) == (2, True, False)
    assert facts.has_device_directory
    assert facts.own_read_problem == ""
    assert (facts.kernel, facts.gpu_driver, facts.has_peer_memory) == ("6.1.0", OPEN, True)
    assert facts.tcp_buffers == {"net.ipv4.tcp_rmem": 6291456, "net.ipv4.tcp_wmem": None}
    assert (facts.has_kernel_tls, facts.huge_pages) == (False, "never")
    problems = {port.nic.uverbs: port.problem for port in facts.ports}
    assert problems == {"uverbs0": "", "uverbs1": "No such file or directory"}
    one, other = (port for port in facts.ports if port.nic.port == 1)
    assert (one.netdev_mtu, one.has_ecn, one.iommu) == (9000, True, "DMA")
    assert (other.netdev_mtu, other.has_ecn, other.iommu) == (None, None, "")
    assert (one.active_mtu, other.active_mtu) == (None, None)
    assert Bridge("0000:17:00.0", True) in facts.bridges
    assert Bridge("0000:b1:00.0", None) in facts.bridges


# -- PCI


def space(control: int, chain: tuple[int, ...] = (0x100, 0x148, 0x220)) -> bytes:
    """A configuration space of 4096 bytes whose last extended capability is ACS."""
    config = bytearray(4096)
    struct.pack_into("<HH", config, 0, 0x10B5, 0x8747)
    for place, after in zip(chain, (*chain[1:], 0), strict=True):
        number = 0x0001 if after else 0x000D
        struct.pack_into("<I", config, place, number | 1 << 16 | after << 20)
    struct.pack_into("<HH", config, chain[-1] + 4, 0x1F, control)
    return bytes(config)


@pytest.mark.parametrize(
    ("control", "redirects"),
    # As lspci shows it: SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ is 0x1d.
    [(0x00, False), (0x1D, True), (0x04, True), (0x08, True), (0x10, True), (0x23, False)],
)
def test_acs_is_read_from_the_configuration_space(control: int, redirects: bool) -> None:
    assert acs_redirects(space(control)) is redirects
    assert acs_redirects(space(control, (0x100,))) is redirects


def test_a_space_that_is_not_shown_is_not_known() -> None:
    whole = space(0x1D)
    assert acs_redirects(whole[:64]) is None
    assert acs_redirects(whole[:256]) is None
    assert acs_redirects(whole[:0x200]) is None
    assert acs_redirects(b"") is None


def test_a_bridge_without_acs_redirects_nothing() -> None:
    assert acs_redirects(bytes(4096)) is False


def test_a_chain_that_leads_back_ends() -> None:
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 1 | 0x148 << 20)
    struct.pack_into("<I", config, 0x148, 1 | 0x100 << 20)
    assert acs_redirects(bytes(config)) is False


@given(st.binary(max_size=4096))
def test_any_bytes_have_an_answer(config: bytes) -> None:
    assert acs_redirects(config) in (True, False, None)


def test_sizes_are_said_in_the_largest_unit() -> None:
    assert [size_text(n) for n in (65536, 8 << 20, 3 << 29)] == ["64 KiB", "8 MiB", "1.5 GiB"]
