# SPDX-License-Identifier: Apache-2.0
"""NICs, GPUs and addresses as sysfs shows them, and the order that follows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from te_sysfs import V1, V2, Sysfs, dgx_h100, one_socket, two_sockets

from te.cli import main
from te.errors import TopologyError
from te.topology import (
    Gid,
    GidKind,
    Link,
    Locality,
    bytes_per_s_of,
    choose_nics,
    gid_pairs,
    parse_override,
    rank,
    read_addresses,
    read_gids,
    read_machine,
)
from te.topology.addresses import parse_inet6
from te.topology.gids import parse_gid
from te.topology.locality import link

pytestmark = pytest.mark.pure

# NVIDIA's DGX H100 user guide, table of network modules: the NIC of each GPU.
DGX_PAIRS = (
    "mlx5_0",
    "mlx5_3",
    "mlx5_4",
    "mlx5_5",
    "mlx5_6",
    "mlx5_9",
    "mlx5_10",
    "mlx5_11",
)


def test_each_gpu_of_a_dgx_prefers_its_own_nic(tmp_path: Path) -> None:
    machine = read_machine(dgx_h100(tmp_path))
    topology = rank(machine)
    assert [gpu.index for gpu in machine.gpus] == list(range(8))
    for i, own in enumerate(DGX_PAIRS):
        place = f"cuda:{i}"
        assert topology.locality(place).preferred == (own,)
        assert len(topology.locality(place).other) == 11
        distances = {nic.name: topology.distance(place, nic.name) for nic in topology.nics}
        near = {name for name, distance in distances.items() if distance == 1}
        assert near == {nic.name for nic in machine.nics if nic.numa == i // 4} - {own}
        assert sum(distance == 2 for distance in distances.values()) == 6
    assert topology.gpus["0000:1b:00.0"] == "cuda:0"
    assert topology.gpus["0000:df:00.0"] == "cuda:7"


def test_host_memory_of_a_dgx_prefers_the_nics_of_its_socket(tmp_path: Path) -> None:
    topology = rank(read_machine(dgx_h100(tmp_path)))
    first = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5")
    second = ("mlx5_6", "mlx5_7", "mlx5_8", "mlx5_9", "mlx5_10", "mlx5_11")
    assert topology.locality("cpu:0") == Locality(first, second)
    assert topology.locality("cpu:1") == Locality(second, first)
    assert topology.distance("cpu:1", "mlx5_0") == 2


def test_two_sockets_with_two_ports_each(tmp_path: Path) -> None:
    machine = read_machine(two_sockets(tmp_path))
    assert [(nic.name, nic.state) for nic in machine.nics] == [
        ("mlx5_0", "ACTIVE"),
        ("mlx5_0:2", "DOWN"),
        ("mlx5_1", "ACTIVE"),
        ("mlx5_1:2", "DOWN"),
    ]
    assert machine.nics[0].rate_gbps == 100
    assert [nic.uverbs for nic in machine.nics] == ["uverbs0", "uverbs0", "uverbs1", "uverbs1"]
    topology = rank(machine, [nic for nic in machine.nics if nic.is_active])
    assert topology.locality("cuda:1") == Locality(("mlx5_1",), ("mlx5_0",))
    assert topology.distance("cuda:1", "mlx5_0") == 2
    assert topology.distance("cuda:1", "mlx5_1:2") is None


def test_a_small_machine_without_numa(tmp_path: Path) -> None:
    machine = read_machine(one_socket(tmp_path))
    assert machine.nodes == (0,)
    assert machine.gpus == ()  # a display adapter is none
    rxe, siw = machine.nics
    assert rxe.pci == ("pci0000:00", "0000:00:03.0")  # of the card below
    assert siw.pci == ()
    assert (rxe.kind, siw.kind) == ("CA", "RNIC")
    assert rank(machine).locality("cpu:0") == Locality(("rxe0", "siw0"))


def test_the_interface_of_a_card_is_known_without_a_gid(tmp_path: Path) -> None:
    tree = Sysfs(tmp_path)
    card = "pci0000:00/0000:00:03.0"
    tree.nic("mlx5_0", card, 0, ports=["4: ACTIVE"] * 2, link_layer="Ethernet", gids=[])
    tree.netdev("ens3f0", card)
    assert [nic.netdev for nic in read_machine(tmp_path).nics] == ["ens3f0", ""]


def test_a_machine_without_rdma_has_no_nics(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert (machine.nics, machine.gpus, machine.nodes) == ((), (), (0,))
    assert rank(machine).locality("cpu:0") == Locality(())


@pytest.mark.parametrize(
    ("one", "other", "numa", "expected"),
    [
        ("b a/1/2/3/4", "b a/1/2/5/6", (0, 0), Link.PIX),
        ("b a/1/2/3/4", "b a/1/2/5/6/7/8", (0, 0), Link.PXB),
        ("b a/1/2", "b c/1/2", (0, 0), Link.PHB),
        ("b a/1", "d a/1", (0, 0), Link.NODE),
        ("b a/1", "d a/1", (0, 1), Link.SYS),
        ("b a/1", "d a/1", (-1, 1), Link.NODE),
    ],
)
def test_links_have_the_names_of_nvidia_smi(
    one: str, other: str, numa: tuple[int, int], expected: Link
) -> None:
    paths = [path.replace(" ", "/").split("/") for path in (one, other)]
    assert link(paths[0], numa[0], paths[1], numa[1]) is expected
    assert link(paths[1], numa[1], paths[0], numa[0]) is expected


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ([], "0 1 2 3 4 5 6 7 8 9 10 11"),
        (["mlx5_1"], "1"),
        (["mlx5_1*"], "1 10 11"),
        (["!mlx5_1", "!mlx5_2", "!mlx5_[78]"], "0 3 4 5 6 9 10 11"),
        (["mlx5_1*", "!mlx5_10"], "1 11"),
    ],
)
def test_filters(tmp_path: Path, patterns: list[str], expected: str) -> None:
    chosen = choose_nics(read_machine(dgx_h100(tmp_path)).nics, patterns)
    assert [nic.name for nic in chosen] == [f"mlx5_{i}" for i in expected.split()]


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        (["ib0"], "no RDMA device matches 'ib0'; there are: rxe0, siw0"),
        (["!*"], r"!\* excludes every RDMA device; there are: rxe0, siw0"),
    ],
)
def test_filters_that_leave_nothing_are_refused(
    tmp_path: Path, patterns: list[str], says: str
) -> None:
    with pytest.raises(TopologyError, match=says):
        choose_nics(read_machine(one_socket(tmp_path)).nics, patterns)


def test_an_override_is_complete(tmp_path: Path) -> None:
    machine = read_machine(dgx_h100(tmp_path))
    text = '{"cuda:0": [["mlx5_3"], ["mlx5_0"]], "*": [["mlx5_1", "mlx5_7"]]}'
    topology = parse_override(text, machine)
    assert [nic.name for nic in topology.nics] == ["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_7"]
    assert topology.distance("cuda:0", "mlx5_3") == 0
    assert topology.distance("cuda:0", "mlx5_0") == 1
    assert topology.distance("cuda:0", "mlx5_1") is None
    assert topology.locality("cpu:1") == Locality(("mlx5_1", "mlx5_7"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON of the form"),
        ('{"cpu:0": ["rxe0"]}', "is not JSON of the form"),
        ('{"cpu:0": [["rxe0"], [], []]}', "is not JSON of the form"),
        ("{}", "contains no memory location"),
        ('{"cpu:7": [["rxe0"]]}', r"the location 'cpu:7'; here are: cpu:0, \*"),
        ('{"cpu:0": [["mlx5_0"]]}', "gives cpu:0 the NIC 'mlx5_0'; there are: rxe0, siw0"),
        ('{"cpu:0": [["rxe0"], ["rxe0"]]}', "the NIC 'rxe0' twice"),
        ('{"cpu:0": [[]]}', "gives cpu:0 no NIC"),
    ],
)
def test_a_bad_override_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        parse_override(text, read_machine(one_socket(tmp_path)))


def test_gids_with_their_kinds(tmp_path: Path) -> None:
    machine = read_machine(two_sockets(tmp_path))
    table = read_gids(machine.nics[0], tmp_path)
    assert [(gid.index, gid.kind, gid.roce, gid.text) for gid in table] == [
        (0, GidKind.LINK_LOCAL, 1, "fe80::ac0:ebff:fe00:1"),
        (1, GidKind.LINK_LOCAL, 2, "fe80::ac0:ebff:fe00:1"),
        (2, GidKind.IPV4, 1, "::ffff:192.168.0.1"),
        (3, GidKind.IPV4, 2, "::ffff:192.168.0.1"),
    ]
    assert table[3].raw == bytes(10) + b"\xff\xff\xc0\xa8\x00\x01"


@pytest.mark.parametrize(
    ("machine", "nic", "kind"),
    [(dgx_h100, 0, GidKind.INFINIBAND), (one_socket, 1, GidKind.HARDWARE)],
)
def test_gids_of_other_fabrics(
    tmp_path: Path, machine: Callable[[Path], Path], nic: int, kind: GidKind
) -> None:
    found = read_machine(machine(tmp_path)).nics[nic]
    assert [(gid.kind, gid.roce) for gid in read_gids(found, tmp_path)] == [(kind, 0)]


def gids(root: Path, *entries: tuple[str, str, str]) -> tuple[Gid, ...]:
    """Of a RoCE port whose table is (GID, type, interface) by index."""
    nic = read_machine(root).nics[0]
    found = (parse_gid(index, *entry, nic) for index, entry in enumerate(entries))
    return tuple(gid for gid in found if gid is not None)


def test_gid_pairs_are_tried_from_the_likeliest(tmp_path: Path) -> None:
    root = two_sockets(tmp_path)
    local = gids(
        root,
        ("fe80::1", V1, "eth0"),
        ("fe80::1", V2, "eth0"),
        ("::ffff:10.1.0.1", V1, "eth0"),
        ("::ffff:10.1.0.1", V2, "eth0"),
        ("::ffff:172.17.0.1", V2, "docker0"),
        ("2001:db8::1", V2, "eth0"),
        ("::ffff:192.168.7.1", V2, "eth1"),
    )
    remote = gids(
        root,
        ("::ffff:192.168.7.2", V2, "eth1"),
        ("fe80::2", V2, "eth0"),
        ("::ffff:10.1.0.2", V2, "eth0"),
        ("::ffff:10.1.0.2", V1, "eth0"),
    )
    order = [(one.index, other.index) for one, other in gid_pairs(local, remote)]
    same_subnet = {(3, 2), (6, 0)}
    assert set(order[:2]) == same_subnet
    assert set(order[2:4]) == {(3, 0), (6, 2)}
    assert order[4] == (1, 1)  # within one network
    assert set(order[5:7]) == {(4, 0), (4, 2)}  # by way of a container network
    assert order[7:] == [(2, 3)]  # RoCE v1, which routers do not pass


def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--root", str(dgx_h100(tmp_path)), "--nics", "!mlx5_1"]) == 0
    out = capsys.readouterr().out
    assert "mlx5_10  ACTIVE  InfiniBand  400 Gbit/s  1     0000:ce:00.0" in out
    assert "cuda:6  0000:d1:00.0  mlx5_10" in out
    assert "mlx5_1 " not in out


def test_the_command_prints_json_that_is_an_override(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = two_sockets(tmp_path / "root")
    assert main(["topology", "--json", "--root", str(root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nics"][0]["name"] == "mlx5_0"
    assert found["gids"]["mlx5_0"][3]["text"] == "::ffff:192.168.0.1"
    override = tmp_path / "override.json"
    override.write_text(json.dumps(found["localities"]))
    assert main(["topology", "--json", "--root", str(root), "--override", str(override)]) == 0
    assert json.loads(capsys.readouterr().out)["localities"] == found["localities"]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--nics", "ib0"], 2, "te topology: no RDMA device matches 'ib0'; there are: rxe0, siw0"),
        (["--override", "/nowhere"], 2, "te topology: cannot read /nowhere: No such file"),
        (["--override", "/nowhere", "--nics", "rxe0"], 2, "--nics cannot be given beside it"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    says: str,
) -> None:
    assert main(["topology", "--root", str(one_socket(tmp_path)), *arguments]) == status
    err = capsys.readouterr().err
    assert says in err
    assert len(err.splitlines()) == 1


def test_no_device_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--root", str(tmp_path)]) == 1
    assert "No RDMA devices" in capsys.readouterr().out


def test_addresses_of_an_interface() -> None:
    found = read_addresses("lo")
    assert [gid.index for gid in found] == list(range(len(found)))
    assert (found[0].text, found[0].kind) == ("::ffff:127.0.0.1", GidKind.IPV4)
    assert found[0].raw == bytes(10) + b"\xff\xff\x7f\0\0\x01"
    assert read_addresses("no-such-link") == ()


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("25000\n", 3.125e9), ("-1\n", 0.0), ("fast\n", 0.0), (None, 0.0)]
)
def test_the_speed_of_the_interface_that_has_an_address(
    tmp_path: Path, text: str | None, bytes_per_s: float
) -> None:
    (tmp_path / "lo").mkdir()
    if text is not None:
        (tmp_path / "lo" / "speed").write_text(text)
    assert bytes_per_s_of("127.0.0.1", tmp_path) == bytes_per_s
    assert bytes_per_s_of("192.0.2.1", tmp_path) == 0.0  # Nobody here has it.
    assert bytes_per_s_of("127.0.0.1", tmp_path / "nothing") == 0.0


def test_global_addresses_in_the_kernels_table() -> None:
    table = (
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
        "20010db8000000000000000000000008 03 40 00 80     eth1\n"
    )
    assert parse_inet6(table, "eth0") == ["2001:db8::7"]
    assert parse_inet6("", "eth0") == []
