# SPDX-License-Identifier: Apache-2.0
"""What test writes and the comparison of two hosts mean, and how they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from te_doctor_machine import ports, well

from te.doctor import Facts, Severity
from te.doctor.catalogue import CATALOGUE
from te.doctor.findings import judge
from te.doctor.messages import Host
from te.doctor.outcome import Cell, End, Stage, matching_pairs, see_cells, see_hosts
from te.doctor.report import Report, summary
from te.doctor.tables import cell_text, matrix_tables, port_table, rate_text, time_text

pytestmark = pytest.mark.pure

STAGES = list(Stage)


def cell(here: str, there: str, stage: Stage = Stage.DONE, **changes: Any) -> Cell:
    """Between a device of host a and one of host b."""
    fields = {
        "transport": "rdma",
        "here": End(name=here, host="a", address="10.0.0.1", netdev="eth0"),
        "there": End(name=there, host="b", address="10.0.0.2"),
        "stage": stage,
        "problem": "" if stage is Stage.DONE else "it broke",
        "latency_s": 35e-6,
        "bytes_per_s": 12.34e9,
    }
    return Cell(**fields | changes)


def host(facts: Facts, **changes: Any) -> Host:
    fields = {
        "name": "a",
        "version": "1.0",
        "protocol": 10,
        "addresses": ("10.0.0.1",),
        "facts": facts,
        "findings": (),
        "gid_index": None,
    }
    return Host(**fields | changes)


@pytest.fixture
def good(tmp_path: Path) -> Facts:
    return well(tmp_path / "good")


@pytest.mark.parametrize(
    ("stage", "name", "says"),
    [
        (Stage.CONNECT, "rail-unreachable", "mlx5_0 of a cannot connect to mlx5_1 of b: it broke."),
        (Stage.SMALL, "rail-unreachable", "ping -I 10.0.0.1 10.0.0.2"),
        (Stage.LARGE, "large-writes-lost", "ip link set eth0 mtu 1500"),
        (Stage.BYTES, "bytes-wrong", "from mlx5_0 of a to mlx5_1 of b arrived changed"),
    ],
)
def test_what_does_not_go_well_is_found_at_both_ends(stage: Stage, name: str, says: str) -> None:
    cells = [cell("mlx5_0", "mlx5_0"), cell("mlx5_0", "mlx5_1", stage)]
    (one,) = judge(see_cells(cells), ("rdma",))
    assert (one.name, one.transport, one.severity) == (name, "rdma", Severity.WARNING)
    assert one.where == ("mlx5_0@a", "mlx5_1@b")
    assert says in one.sentence


@pytest.mark.parametrize("stage", [one for one in Stage if one is not Stage.DONE])
def test_on_one_host_the_way_is_named(stage: Stage) -> None:
    end = End(name="mlx5_0")
    tried = structs.replace(cell("x", "y", stage), here=end, there=end)
    (one,) = judge(see_cells([tried]), ())
    assert one.name == ("bytes-wrong" if stage is Stage.BYTES else "loopback-failed")
    assert one.where == ("mlx5_0",)
    assert one.severity is Severity.ERROR


def test_an_address_that_te_does_not_use_is_a_hint() -> None:
    spare = cell("10.0.0.1", "10.9.0.2", Stage.CONNECT, transport="tcp", is_spare=True)
    (one,) = judge(see_cells([cell("a", "b", transport="tcp"), spare]), ("tcp",))
    assert (one.name, one.severity, one.blocks) == ("address-unreachable", Severity.HINT, False)


def test_hosts_that_do_not_reach_each_other_at_all_are_one_finding() -> None:
    cells = [cell(f"m{i}", f"m{j}", Stage.CONNECT) for i in range(8) for j in range(8)]
    (one,) = judge(see_cells(cells), ())
    assert (one.name, one.where, one.severity) == ("peer-unreachable", ("a", "b"), Severity.ERROR)
    assert "over rdma; the first, m0 of a to m0 of b: it broke." in one.what


@pytest.mark.parametrize("fault", [None, (0, 1), (0, 0)])
def test_rails_that_reach_their_counterparts_alone_are_one_hint(
    fault: tuple[int, int] | None,
) -> None:
    """Unless one of them does not reach its own, or reaches another."""
    cells = []
    for i in range(4):
        for j in range(4):
            connects = (i == j) != ((i, j) == fault)
            stage = Stage.DONE if connects else Stage.CONNECT
            cells.append(cell(f"m{i}", f"m{j}", stage, is_spare=i != j))
    found = judge(see_cells(cells), ())
    if fault is None:
        (one,) = found
        assert (one.name, one.where, one.severity) == ("rails-isolated", ("a", "b"), Severity.HINT)
    else:
        assert {one.name for one in found} == {"rail-unreachable"}
        assert len(found) == 12 + (1 if fault == (0, 0) else -1)


@given(st.lists(st.tuples(st.sampled_from(["rdma", "tcp"]), st.sampled_from(STAGES)), max_size=8))
def test_a_transport_is_blocked_when_none_of_its_ways_works(
    ways: list[tuple[str, Stage]],
) -> None:
    cells = [cell(f"d{i}", "e", stage, transport=name) for i, (name, stage) in enumerate(ways)]
    found = judge(see_cells(cells), ())
    working = {name for name, stage in ways if stage is Stage.DONE}
    assert {one.transport for one in found if one.blocks} == {n for n, _ in ways} - working
    for one in found:
        if one.name != "peer-unreachable":
            assert one.where[0].partition("@")[0] in {cell.here.name for cell in cells}
        assert one.blocks == (one.transport not in working)
        assert (one.severity is Severity.ERROR) == one.blocks


# -- two hosts


NAMES = ("a", "b")


def test_two_hosts_that_are_alike(good: Facts) -> None:
    assert list(see_hosts(host(good), host(good, name="b"), NAMES)) == []


@pytest.mark.parametrize(
    ("changes", "blocks"), [({"version": "1.1"}, False), ({"protocol": 11}, True)]
)
def test_versions_are_compared(good: Facts, changes: dict[str, Any], blocks: bool) -> None:
    (one,) = judge(see_hosts(host(good), host(good, **changes), NAMES), ())
    assert (one.name, one.where, one.blocks) == ("versions-differ", NAMES, blocks)
    assert one.severity is (Severity.ERROR if blocks else Severity.WARNING)
    assert "sglang-mooncake 1.0 (protocol 10), b runs" in one.what
    assert one.mend.endswith("sglang-mooncake==1.0")


def test_mtus_are_compared_over_both_hosts(good: Facts, tmp_path: Path) -> None:
    small = tuple(structs.replace(port, netdev_mtu=1500) for port in good.ports)
    far = host(structs.replace(good, ports=small))
    (one,) = judge(see_hosts(host(good), far, NAMES), ())
    assert (one.name, one.where) == ("mtu-mixed", ("mlx5_0@b", "mlx5_1@b"))
    # A port that cannot be used has no say.
    unused = host(structs.replace(good, ports=small), gid_index=99)
    assert list(see_hosts(host(good), unused, NAMES)) == []


def test_devices_of_different_kinds_are_found(good: Facts, tmp_path: Path) -> None:
    siw = ports(tmp_path / "siw", node_type="4: RNIC")[1:]
    far = host(structs.replace(good, ports=siw))
    (one,) = judge(see_hosts(host(good), far, NAMES), ("rdma",))
    assert (one.name, one.severity) == ("networks-differ", Severity.ERROR)
    assert one.what == "a has RoCE devices and b has iWARP devices."
    infiniband = ports(tmp_path / "ib", link_layer="InfiniBand")[1:]
    far = host(structs.replace(good, ports=infiniband))
    (one,) = judge(see_hosts(host(good), far, NAMES), ("rdma",))
    assert "b has InfiniBand devices" in one.what
    assert matching_pairs(good.ports, siw) == []
    assert len(matching_pairs(good.ports, good.ports)) == 4


# -- what is printed


def test_times_and_rates() -> None:
    assert [time_text(one) for one in (None, 35e-6, 1.25e-3)] == ["none", "35 µs", "1.2 ms"]
    assert [rate_text(one) for one in (None, 85e6, 12.34e9)] == ["none", "85 MB/s", "12.3 GB/s"]


def test_a_cell_shows_how_far_it_has_come() -> None:
    shown = [cell_text(cell("a", "b", stage)) for stage in STAGES]
    assert shown == [
        ("none", ""),
        ("none", ""),
        ("35 µs", "lost"),
        ("35 µs", "wrong"),
        ("35 µs", "12.3 GB/s"),
    ]


def test_the_matrix_has_a_row_for_each_end_here() -> None:
    cells = [
        cell("mlx5_0", "mlx5_0"),
        cell("mlx5_0", "mlx5_1", Stage.CONNECT),
        cell("10.0.0.1", "10.0.0.2", transport="tcp"),
    ]
    assert matrix_tables(cells) == [
        "rdma: a (rows) to b (columns)",
        "        mlx5_0           mlx5_1",
        "mlx5_0  35 µs 12.3 GB/s  none",
        "",
        "tcp: a to b",
        "from      to        latency  rate",
        "10.0.0.1  10.0.0.2  35 µs    12.3 GB/s",
    ]


def test_ports_show_what_decides_about_connections(good: Facts, tmp_path: Path) -> None:
    lines = port_table(good, None)
    assert lines[1].split() == [
        *("mlx5_0", "ACTIVE", "Ethernet", "400", "Gbit/s", "9000", "4096", "1"),
        "(::ffff:10.1.0.1)",
    ]
    (line,) = port_table(structs.replace(good, ports=good.ports[:1]), 7)[1:]
    assert line.split()[-1] == "-"
    unknown = ports(tmp_path / "x", netdev_mtu=None, active_mtu=None, node_type="4: RNIC")[1:]
    (line,) = port_table(structs.replace(good, ports=unknown), 7)[1:]
    assert "iWARP" in line
    assert line.split()[5:7] == ["?", "?"]
    assert "0 (fe80::1)" in line


def test_a_report_of_two_hosts_shows_both(good: Facts) -> None:
    far = host(structs.replace(good, ports=()), name="b")
    found = judge(see_cells([cell("mlx5_0", "mlx5_1", Stage.CONNECT)]), ())
    report = Report(
        here=host(good),
        transports=("rdma", "tcp"),
        findings=found,
        there=far,
        names=NAMES,
        matrix=(cell("mlx5_0", "mlx5_1", Stage.CONNECT),),
    )
    text = report.text()
    for part in (
        "te doctor on a, with b\n",
        "rdma      not possible\n",
        "tcp       possible\n",
        "RDMA devices of b\nnone\n",
        "\nerror    rail-unreachable (mlx5_0@a, mlx5_1@b)\n",
        "\n1 error, 0 warnings, 0 hints.\n",
    ):
        assert part in text
    assert report.exit_status == 2


def test_the_summary_counts() -> None:
    assert summary(()) == "0 errors, 0 warnings, 0 hints."


def test_every_kind_is_seen_by_some_rule() -> None:
    """Names that the code mentions are those of the catalogue, and the other way round."""
    folder = Path(__file__).parents[2] / "te" / "doctor"
    texts = [(folder / f"{one}.py").read_text() for one in ("rules", "host_rules", "outcome")]
    assert not [name for name in CATALOGUE if not any(f'"{name}"' in text for text in texts)]
