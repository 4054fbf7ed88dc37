# SPDX-License-Identifier: Apache-2.0
"""Each thing that can be wrong with a machine's transports has a name, a consequence and a command
that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from te_doctor_machine import ports, well
from te_sysfs import V1, V2, dgx_h100

from te.doctor import Facts, Port, Severity, findings
from te.doctor.catalogue import CATALOGUE
from te.doctor.findings import Kind, Seen, exit_status, judge
from te.doctor.rules import possible, see_mixed_mtus, usable_ports
from te.topology import read_gids, read_machine

pytestmark = pytest.mark.pure

MIB = 1 << 20


@pytest.fixture
def good(tmp_path: Path) -> Facts:
    return well(tmp_path / "good")


def usable(facts: Facts, gid_index: int | None = None) -> list[str]:
    return [port.nic.name for port in usable_ports(facts, gid_index)]


def test_a_good_machine_has_no_findings(good: Facts) -> None:
    assert findings(good) == ()
    assert usable(good) == ["mlx5_0", "mlx5_1"]


MISSING = {"libibverbs.so.1": "no such file", "librdmacm.so.1": "no such file"}


@pytest.mark.parametrize(
    ("changes", "name", "unasked", "says"),
    [
        ({"libraries": MISSING}, "libibverbs-missing", "error", "loaded (no such file)."),
        ({"ports": ()}, "rdma-device-missing", "hint", "no RDMA device in /sys/class/infiniband"),
        ({"has_verbs_class": False}, "uverbs-missing", "error", "modprobe ib_uverbs"),
        ({"has_device_directory": False}, "dev-infiniband-missing", "error", "In a container"),
        ({"memlock_nbytes": 8 * MIB}, "memlock-low", "error", "may lock 8 MiB of memory"),
        ({"memlock_nbytes": 65536}, "memlock-low", "error", "may lock 64 KiB of memory"),
        ({"ptrace_scope": 2}, "ptrace-restricted", "warning", "kernel.yama.ptrace_scope=1"),
        ({"ptrace_scope": 3, "may_ptrace": True}, "ptrace-restricted", "warning", "and reboot"),
        ({"own_read_problem": "not permitted"}, "process-read-refused", "warning", "seccomp"),
    ],
)
def test_what_blocks_a_transport(
    good: Facts, changes: dict[str, Any], name: str, unasked: str, says: str
) -> None:
    facts = structs.replace(good, **changes)
    (one,) = findings(facts)
    assert one.name == name
    assert says in one.sentence
    assert one.severity == unasked
    assert not possible(one.transport, (one,))
    assert possible("tcp", (one,))
    (asked,) = findings(facts, asked=(one.transport,))
    assert asked.severity is Severity.ERROR


@pytest.mark.parametrize(
    "changes",
    [
        {"ptrace_scope": None},
        {"ptrace_scope": 0},
        {"ptrace_scope": 2, "may_ptrace": True},
        {"memlock_nbytes": 8 * MIB, "may_lock": True},
        {"libraries": {"libibverbs.so.1": "", "librdmacm.so.1": "no such file"}},
    ],
)
def test_what_is_no_trouble(good: Facts, changes: dict[str, Any]) -> None:
    assert findings(structs.replace(good, **changes)) == ()


def test_a_limit_that_a_small_cache_fits_into_is_a_warning(good: Facts) -> None:
    (one,) = findings(structs.replace(good, memlock_nbytes=3 << 29), asked=("rdma",))
    assert (one.name, one.severity, one.blocks) == ("memlock-low", Severity.WARNING, False)
    assert "may lock 1.5 GiB of memory" in one.what


NIC_TROUBLES = [
    ({"ports": ["1: DOWN"]}, "port-down", "ip link set eth1 up"),
    ({"ports": ["1: DOWN"], "netdev": "", "gids": []}, "port-down", "Check the cable"),
    (
        {"ports": ["2: INIT"], "link_layer": "InfiniBand"},
        "subnet-manager-missing",
        "systemctl start opensm",
    ),
    ({"gids": []}, "gid-missing", "ip address add ADDRESS/PREFIX dev INTERFACE"),
    ({"problem": "Permission denied"}, "device-refused", "chmod a+rw /dev/infiniband/uverbs1"),
    ({"problem": "No such file or directory"}, "device-refused", "--device=/dev/infiniband"),
]


@pytest.mark.parametrize(("changes", "name", "mend"), NIC_TROUBLES)
def test_one_bad_nic_of_two_limits(
    good: Facts, tmp_path: Path, changes: dict[str, Any], name: str, mend: str
) -> None:
    facts = structs.replace(good, ports=ports(tmp_path / "bad", **changes))
    (one,) = findings(facts, asked=("rdma",))
    assert (one.name, one.where, one.severity) == (name, ("mlx5_1",), Severity.WARNING)
    assert mend in one.mend
    assert not one.blocks
    assert usable(facts) == ["mlx5_0"]


@pytest.mark.parametrize(("changes", "name", "mend"), NIC_TROUBLES)
def test_the_only_nic_being_bad_blocks(
    good: Facts, tmp_path: Path, changes: dict[str, Any], name: str, mend: str
) -> None:
    facts = structs.replace(good, ports=ports(tmp_path / "bad", **changes)[1:])
    (one,) = findings(facts)
    assert (one.name, one.severity, one.blocks) == (name, Severity.ERROR, True)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"gids": [("fe80::1", V2)]}, "gid-link-local"),
        ({"gids": [("::ffff:10.1.0.2", V1)]}, "gid-v1-only"),
        ({"gids": [("::ffff:172.17.0.1", V2)], "netdev": "docker0"}, "gid-overlay"),
    ],
)
def test_gids_that_reach_few_peers_limit(
    good: Facts, tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    facts = structs.replace(good, ports=ports(tmp_path / "weak", **changes))
    (one,) = findings(facts)
    assert (one.name, one.where, one.severity) == (name, ("mlx5_1",), Severity.WARNING)
    assert usable(facts) == ["mlx5_0", "mlx5_1"]


def test_a_forced_gid_that_is_not_there_is_found_by_device(good: Facts, tmp_path: Path) -> None:
    assert findings(good, gid_index=1) == ()
    one, other = findings(good, gid_index=7)
    assert {one.where, other.where} == {("mlx5_0",), ("mlx5_1",)}
    assert (one.name, one.severity) == ("gid-forced-missing", Severity.ERROR)
    assert "GID index 7 was asked for" in one.what
    assert "it has 1 (::ffff:10.1.0.1)" in one.what
    assert usable(good, gid_index=7) == []
    mixed = structs.replace(good, ports=ports(tmp_path / "mixed", gids=[("::ffff:10.1.0.2", V2)]))
    (one,) = findings(mixed, gid_index=1)
    assert (one.where, one.severity, one.blocks) == (("mlx5_1",), Severity.WARNING, False)


def test_the_entry_of_roce_v1_is_not_what_a_forced_gid_means(good: Facts) -> None:
    assert {one.name for one in findings(good, gid_index=0)} == {"gid-forced-missing"}


def test_iwarp_needs_the_connection_manager(good: Facts, tmp_path: Path) -> None:
    siw = ports(tmp_path / "siw", node_type="4: RNIC")
    without = {"libibverbs.so.1": "", "librdmacm.so.1": "no such file"}
    (one,) = findings(structs.replace(good, ports=siw, libraries=without))
    assert (one.name, one.where) == ("librdmacm-missing", ("mlx5_1",))
    assert not one.blocks
    (one,) = findings(structs.replace(good, ports=siw[1:], libraries=without))
    assert one.blocks


def test_a_forced_gid_says_nothing_to_iwarp(good: Facts, tmp_path: Path) -> None:
    siw = ports(tmp_path / "siw", node_type="4: RNIC")
    assert findings(structs.replace(good, ports=siw[1:]), gid_index=200) == ()


def test_infiniband_has_no_gid_of_another_kind_to_want(good: Facts, tmp_path: Path) -> None:
    nics = read_machine(dgx_h100(tmp_path)).nics
    some = tuple(Port(nic=nic, gids=read_gids(nic, tmp_path), problem="") for nic in nics)
    assert findings(structs.replace(good, ports=some), gid_index=3) == ()


def test_mixed_mtus_name_the_ports_with_the_smaller_one(good: Facts, tmp_path: Path) -> None:
    facts = structs.replace(good, ports=ports(tmp_path / "mtu", netdev_mtu=1500))
    (one,) = findings(facts)
    assert (one.name, one.where, one.severity) == ("mtu-mixed", ("mlx5_1",), Severity.WARNING)
    assert "9000 (mlx5_0); 1500 (mlx5_1)" in one.what
    assert one.mend.endswith("ip link set eth1 mtu 9000")


def test_mtus_are_compared_within_one_kind_of_network(good: Facts, tmp_path: Path) -> None:
    for changes in (
        {"link_layer": "InfiniBand", "netdev_mtu": 2044, "active_mtu": 2048},
        {"node_type": "4: RNIC", "netdev_mtu": 1500},
        {"netdev_mtu": None, "active_mtu": None},
        {"ports": ["1: DOWN"], "netdev_mtu": 1500},
    ):
        some = ports(tmp_path / f"{len(list(tmp_path.iterdir()))}", **changes)
        names = {one.name for one in findings(structs.replace(good, ports=some))}
        assert "mtu-mixed" not in names, changes


def test_infinibands_mtu_is_that_of_its_port(tmp_path: Path) -> None:
    changes = {"link_layer": "InfiniBand", "active_mtu": 2048}
    first = ports(tmp_path / "a", **changes)[1]
    second = structs.replace(first, active_mtu=4096, netdev_mtu=first.netdev_mtu)
    (one,) = see_mixed_mtus([("here", first), ("there", second)])
    assert one.where == ("mlx5_1@here",)
    assert one.values["mtus"] == "4096 (mlx5_1@there); 2048 (mlx5_1@here)"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Port:
    return ports(tmp_path_factory.mktemp("ports"))[0]


@given(mtus=st.lists(st.sampled_from([1500, 4200, 9000]), min_size=1, max_size=8))
def test_mixed_mtus_are_found_if_and_only_if_they_are_mixed(port: Port, mtus: list[int]) -> None:
    some = [(f"h{i}", structs.replace(port, netdev_mtu=mtu)) for i, mtu in enumerate(mtus)]
    found = list(see_mixed_mtus(some))
    assert len(found) == (len(set(mtus)) > 1)
    for one in found:
        small = {f"mlx5_0@h{i}" for i, mtu in enumerate(mtus) if mtu < max(mtus)}
        assert set(one.where) == small


# -- findings as such


KIND = Kind(
    name="x",
    transport="rdma",
    severity=Severity.HINT,
    unasked=Severity.WARNING,
    what="{a}",
    consequence="c",
    mend="{b}",
)


@pytest.mark.parametrize(
    ("blocks", "asked", "severity", "status"),
    [
        (False, (), Severity.HINT, 0),
        (False, ("rdma",), Severity.HINT, 0),
        (True, (), Severity.WARNING, 1),
        (True, ("tcp",), Severity.WARNING, 1),
        (True, ("rdma",), Severity.ERROR, 2),
    ],
)
def test_the_severity_and_exit_status_of_a_finding(
    blocks: bool, asked: tuple[str, ...], severity: Severity, status: int
) -> None:
    seen = Seen(kind=KIND, blocks=blocks, values={"a": "A", "b": "B"})
    (one,) = judge([seen], asked)
    assert (one.severity, one.what, one.mend) == (severity, "A", "B")
    assert exit_status([one]) == status


def test_a_finding_of_any_transport_takes_the_one_that_was_seen() -> None:
    seen = Seen(kind=CATALOGUE["bytes-wrong"], transport="tcp", values={"here": "a", "there": "b"})
    (one,) = judge([seen], ())
    assert one.transport == "tcp"


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6))
def test_the_worst_comes_first_and_decides(seen: list[tuple[bool, bool]]) -> None:
    values = {"a": "", "b": ""}
    some = [
        Seen(
            kind=structs.replace(KIND, transport="rdma" if is_rdma else "tcp"),
            blocks=blocks,
            values=values,
        )
        for blocks, is_rdma in seen
    ]
    found = judge(some, ("rdma",))
    order = [list(Severity).index(one.severity) for one in found]
    assert order == sorted(order)
    assert exit_status(found) == (exit_status(found[:1]) if found else 0)


def test_a_title_names_place_and_host() -> None:
    seen = Seen(kind=KIND, where=("mlx5_0", "mlx5_1"), values={"a": "", "b": ""})
    (one,) = judge([seen], (), "far")
    assert one.title == "x (mlx5_0, mlx5_1) on far"
    assert structs.replace(one, where=(), host="").title == "x"


def test_every_kind_says_its_three_sentences() -> None:
    for kind in CATALOGUE.values():
        assert kind.what.endswith("."), kind.name
        assert kind.consequence.endswith("."), kind.name
        assert not kind.mend.endswith("."), kind.name
        assert kind.name == kind.name.lower()
