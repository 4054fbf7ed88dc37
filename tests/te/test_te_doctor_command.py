# SPDX-License-Identifier: Apache-2.0
"""``te doctor`` as it is called: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from te_sysfs import Sysfs, two_sockets

from te.cli import main

pytestmark = pytest.mark.pure


def test_it_answers_for_one_transport(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(tmp_path), "--transport", "rdma"]) == 2
    out = capsys.readouterr().out
    assert "\nrdma      not possible\n" in out
    assert "\nerror    rdma-device-missing\n" in out
    assert "    Mend: Load the driver" in out
    assert "1 error, 0 warnings" in out
    assert main(["doctor", "--root", str(tmp_path), "--transport", "tcp"]) == 0
    out = capsys.readouterr().out
    assert "\ntcp       possible\n" in out
    assert "rdma" not in out


def test_without_rdma_devices_there_are_only_hints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--root", str(tmp_path)]) == 0
    assert "hint     rdma-device-missing" in capsys.readouterr().out


def test_it_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_sockets(tmp_path)
    assert main(["doctor", "--root", str(tmp_path), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["exit_status"] == 2
    assert told["transports"]["rdma"] is False
    assert told["transports"]["tcp"] is True
    assert told["findings"][0]["name"] == "dev-infiniband-missing"
    assert told["findings"][0]["severity"] == "error"
    assert told["unknown"]


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Devices that this process may open, of which one's port is down."""
    tree = Sysfs(tmp_path)
    for i, state in enumerate(("4: ACTIVE", "1: DOWN")):
        gids = [(f"::ffff:10.1.0.{i + 1}", "RoCE v2")]
        tree.nic(
            f"mlx5_{i}", None, ports=[state], link_layer="Ethernet", netdev=f"eth{i}", gids=gids
        )
        (tmp_path / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"dev/infiniband/uverbs{i}").touch()
    return tmp_path


@pytest.fixture(autouse=True)
def _libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if libibverbs was installed: what is loaded is this machine's, not the tree's."""
    monkeypatch.setattr("te.doctor.facts._load", lambda name: "")
    monkeypatch.setattr("te.doctor.facts._limit", lambda which: -1)


def test_warnings_are_1_and_errors_2(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--root", str(two), "--transport", "rdma"]) == 1
    out = capsys.readouterr().out
    assert "rdma      possible: mlx5_0\n" in out
    assert "warning  port-down (mlx5_1)\n    The port of mlx5_1 is DOWN.\n" in out
    assert main(["doctor", "--root", str(two), "--transport", "rdma", "--gid-index", "5"]) == 2
    out = capsys.readouterr().out
    assert "error    gid-forced-missing (mlx5_0)" in out
    assert "rdma      not possible" in out
    automatic = ["--gid-index", "-1"]
    assert main(["doctor", "--root", str(two), "--transport", "rdma", *automatic]) == 1
    assert "rdma      possible: mlx5_0\n" in capsys.readouterr().out


def test_devices_are_chosen(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["doctor", "--root", str(two), "--transport", "rdma", "--nics"]
    assert main([*chosen, "mlx5_0"]) == 0
    assert "port-down" not in capsys.readouterr().out
    assert main([*chosen, "!mlx5_0"]) == 2
    assert "error    port-down (mlx5_1)" in capsys.readouterr().out
    assert main([*chosen, "mlx5_7"]) == 3
    assert "no RDMA device matches 'mlx5_7'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["x", "256", "-2"])
def test_bad_arguments_are_3(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", f"--gid-index={text}"])
    assert ended.value.code == 3
    assert f"'{text}' is not a whole number from 0 to 255" in capsys.readouterr().err


def test_bad_arguments_of_other_commands_stay_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["topology", "--no-such-option"])
    assert ended.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err
