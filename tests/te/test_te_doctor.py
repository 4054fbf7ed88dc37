# SPDX-License-Identifier: Apache-2.0
"""Each thing that can be wrong with a machine is one sentence with its fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from te_sysfs import V1, V2, Sysfs, dgx_h100

from te.cli import main
from te.doctor import Facts, Port, findings, gather
from te.doctor.facts import UNLIMITED
from te.doctor.rules import possible, usable_nics
from te.topology import read_gids, read_machine

pytestmark = pytest.mark.pure

MIB = 1 << 20


def ports(root: Path, **changes: Any) -> tuple[Port, ...]:
    """Two RoCE NICs as they should be, the second one changed."""
    tree = Sysfs(root)
    for i in (0, 1):
        gids = [("fe80::1", V1), (f"::ffff:10.1.0.{i + 1}", V2)]
        one: dict[str, Any] = {"link_layer": "Ethernet", "netdev": f"eth{i}", "gids": gids}
        problem = changes.pop("problem", "") if i else ""
        tree.nic(f"mlx5_{i}", None, **{**one, **(changes if i else {})})
    nics = read_machine(root).nics
    return tuple(
        Port(nic=nic, gids=read_gids(nic, root), problem=problem if nic.name == "mlx5_1" else "")
        for nic in nics
    )


@pytest.fixture
def well(tmp_path: Path) -> Facts:
    """A machine on which everything is possible."""
    return Facts(
        libraries={"libibverbs.so.1": "", "librdmacm.so.1": ""},
        ports=ports(tmp_path / "well"),
        has_verbs_class=True,
        has_device_directory=True,
        memlock_nbytes=UNLIMITED,
        may_lock=False,
        ptrace_scope=1,
        may_ptrace=False,
        own_read_problem="",
    )


def test_a_good_machine_has_no_findings(well: Facts) -> None:
    assert findings(well) == ()
    assert usable_nics(well) == ("mlx5_0", "mlx5_1")


MISSING = {"libibverbs.so.1": "no such file", "librdmacm.so.1": "no such file"}


@pytest.mark.parametrize(
    ("changes", "transport", "says"),
    [
        ({"libraries": MISSING}, "rdma", "(no such file); install it: apt-get install libibverbs1"),
        ({"ports": ()}, "rdma", "no RDMA device in /sys/class/infiniband; load the driver"),
        ({"has_verbs_class": False}, "rdma", "modprobe ib_uverbs"),
        ({"has_device_directory": False}, "rdma", "no /dev/infiniband; in a container start it"),
        ({"memlock_nbytes": 8 * MIB}, "rdma", "may lock 8 MiB of memory"),
        ({"ptrace_scope": 2}, "samehost", "sysctl kernel.yama.ptrace_scope=1"),
        ({"ptrace_scope": 3, "may_ptrace": True}, "samehost", "and reboot"),
        ({"own_read_problem": "Operation not permitted"}, "samehost", "seccomp profile"),
    ],
)
def test_what_blocks_a_transport(
    well: Facts, changes: dict[str, Any], transport: str, says: str
) -> None:
    found = findings(structs.replace(well, **changes))
    (one,) = [finding for finding in found if finding.transport == transport]
    assert says in one.text
    assert one.text.count("; ") == 1
    assert not possible(transport, found)
    assert possible("tcp", found)


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
def test_what_is_no_trouble(well: Facts, changes: dict[str, Any]) -> None:
    assert findings(structs.replace(well, **changes)) == ()


NIC_TROUBLES = [
    ({"ports": ["1: DOWN"]}, "mlx5_1: its port is DOWN; run ip link set eth1 up"),
    (
        {"ports": ["2: INIT"], "link_layer": "InfiniBand"},
        "mlx5_1: its port is INIT; start a subnet manager",
    ),
    ({"gids": []}, "mlx5_1: its port has no GID; give its interface an address"),
    ({"problem": "Permission denied"}, "uverbs1 cannot be opened (Permission denied); give"),
    ({"problem": "No such file or directory"}, "(No such file or directory); in a container start"),
]


@pytest.mark.parametrize(("changes", "says"), NIC_TROUBLES)
def test_one_bad_nic_of_two_limits(
    well: Facts, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    facts = structs.replace(well, ports=ports(tmp_path / "bad", **changes))
    (one,) = findings(facts)
    assert says in one.text
    assert not one.blocks
    assert usable_nics(facts) == ("mlx5_0",)


@pytest.mark.parametrize(("changes", "says"), NIC_TROUBLES)
def test_the_only_nic_being_bad_blocks(
    well: Facts, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    facts = structs.replace(well, ports=ports(tmp_path / "bad", **changes)[1:])
    (one,) = findings(facts)
    assert says in one.text
    assert one.blocks


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gids": [("fe80::1", V2)]}, "its only GID is link-local"),
        ({"gids": [("::ffff:10.1.0.2", V1)]}, "RoCE v1 GIDs alone"),
        (
            {"gids": [("::ffff:172.17.0.1", V2)], "netdev": "docker0"},
            "belong to container networks (docker0)",
        ),
    ],
)
def test_gids_that_reach_few_peers_limit(
    well: Facts, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    facts = structs.replace(well, ports=ports(tmp_path / "weak", **changes))
    (one,) = findings(facts)
    assert says in one.text
    assert not one.blocks
    assert usable_nics(facts) == ("mlx5_0", "mlx5_1")


def test_iwarp_needs_the_connection_manager(well: Facts, tmp_path: Path) -> None:
    siw = ports(tmp_path / "siw", node_type="4: RNIC")
    without = {"libibverbs.so.1": "", "librdmacm.so.1": "no such file"}
    (one,) = findings(structs.replace(well, ports=siw, libraries=without))
    assert "mlx5_1 (iWARP) need librdmacm" in one.text
    assert not one.blocks
    (one,) = findings(structs.replace(well, ports=siw[1:], libraries=without))
    assert one.blocks


def test_infiniband_has_no_gid_of_another_kind_to_want(well: Facts, tmp_path: Path) -> None:
    nics = read_machine(dgx_h100(tmp_path)).nics
    some = tuple(Port(nic=nic, gids=read_gids(nic, tmp_path), problem="") for nic in nics)
    assert findings(structs.replace(well, ports=some)) == ()


def test_gathering_reads_below_the_root(tmp_path: Path) -> None:
    dgx_h100(tmp_path)
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("2\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    facts = gather(tmp_path)
    assert (facts.ptrace_scope, facts.may_lock, facts.may_ptrace) == (2, True, False)
    assert facts.has_device_directory
    problems = {port.nic.uverbs: port.problem for port in facts.ports}
    assert problems["uverbs0"] == ""
    assert problems["uverbs1"] == "No such file or directory"
    assert facts.own_read_problem == ""


def test_the_command_answers_for_one_transport(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--root", str(tmp_path), "--transport", "rdma"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("rdma      not possible\n    ")
    assert "no RDMA device" in out
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    assert "tcp       possible" in capsys.readouterr().out


def test_the_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["transports"]["rdma"] is False
    assert told["transports"]["tcp"] is True
    assert told["findings"][-1]["blocks"] is True
