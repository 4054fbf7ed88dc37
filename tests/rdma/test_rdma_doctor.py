# SPDX-License-Identifier: Apache-2.0
"""``te doctor`` finds each fault that is planted here, by its name and at its place, and none of
them where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed_nics import Nic, cut, run, wait_for

pytestmark = pytest.mark.rdma

#: Of a whole check: the machine is emulated, and on one processor.
TIMEOUT_S = 100.0
#: With the kernel's limit held against the process, which root is exempt from.
LIMITED = (
    *("prlimit", "--memlock=65536:65536"),
    *("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"),
)
NOBODY = "02:00:00:00:00:99"
PLANTED = {
    "port-down",
    "memlock-low",
    "gid-forced-missing",
    "rail-unreachable",
    "mtu-mixed",
    "large-writes-lost",
    "loopback-failed",
    "bytes-wrong",
}
DOCTOR = (sys.executable, "-m", "te.cli", "doctor", "--transport", "rdma", "--json")


class Told:
    """What one call of the doctor said."""

    def __init__(self, command: Sequence[str]) -> None:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
        assert done.returncode in (0, 1, 2), done.stdout + done.stderr
        self.status = done.returncode
        self.body: dict[str, Any] = json.loads(done.stdout)

    def planted(self) -> dict[str, set[tuple[str, ...]]]:
        """Places of each fault that these tests plant."""
        found: dict[str, set[tuple[str, ...]]] = {}
        for one in self.body["findings"]:
            if one["name"] in PLANTED:
                found.setdefault(one["name"], set()).add(tuple(one["where"]))
        return found

    def stages(self) -> dict[tuple[str, str], str]:
        """How far each pair of devices has come."""
        return {
            (one["here"]["name"], one["there"]["name"]): one["stage"] for one in self.body["matrix"]
        }


def alone(nics: Sequence[Nic], *options: str, within: Sequence[str] = ()) -> Told:
    chosen = ",".join(nic.device for nic in nics)
    return Told([*within, *DOCTOR, "--nics", chosen, *options])


@contextmanager
def listening(nics: Sequence[Nic], *options: str) -> Iterator[str]:
    """A doctor at the other end, with these devices; its address."""
    chosen = ",".join(nic.device for nic in nics)
    command = [*DOCTOR, "--nics", chosen, "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            yield f"127.0.0.1:{words[words.index('port') + 1]}"
        finally:
            process.terminate()


def between(near: Sequence[Nic], far: Sequence[Nic], *options: str) -> Told:
    """A check from the devices of one end to those of the other."""
    with listening(far, *options) as address:
        return alone(near, "--peer", address, *options)


@pytest.fixture
def ends(rdma_nics: tuple[Nic, ...]) -> tuple[tuple[Nic, ...], tuple[Nic, ...]]:
    return rdma_nics[:2], rdma_nics[2:4]


def pairs(near: Sequence[Nic], far: Sequence[Nic]) -> set[tuple[str, str]]:
    return {(one.device, other.device) for one in near for other in far}


def test_a_machine_without_a_fault(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, far = ends
    told = alone(near)
    assert told.planted() == {}
    assert told.status == 0, told.body["findings"]
    cells = told.body["loop_back"]
    assert [one["here"]["name"] for one in cells] == [nic.device for nic in near]
    assert all(one["stage"] == "done" and one["bytes_per_s"] > 0 for one in cells), cells
    told = between(near, far)
    assert told.planted() == {}
    assert told.status == 0, told.body["findings"]
    assert told.stages() == dict.fromkeys(pairs(near, far), "done")
    assert all(one["latency_s"] > 0 and one["bytes_per_s"] > 0 for one in told.body["matrix"])


def test_a_port_that_is_down(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, far = ends
    bad, good = near
    with cut(bad.netdev):
        wait_for(lambda: bad.state() == "DOWN", 30, "its state")
        told = alone(near)
        assert told.planted() == {"port-down": {(bad.device,)}}
        assert told.status == 1
        (one,) = [one for one in told.body["findings"] if one["name"] == "port-down"]
        assert one["mend"].startswith(f"ip link set {bad.netdev} up")
        assert [one["here"]["name"] for one in told.body["loop_back"]] == [good.device]
        only = alone([bad], "--quick")
        assert only.planted() == {"port-down": {(bad.device,)}}
        assert only.status == 2
        told = between(far, near)
        assert told.planted() == {"port-down": {(bad.device,)}}
        assert told.stages() == dict.fromkeys(pairs(far, [good]), "done")
    wait_for(lambda: bad.state() == "ACTIVE", 30, "its state")


def test_a_limit_of_locked_memory(ends: tuple[tuple[Nic, ...], ...]) -> None:
    told = alone(ends[0], "--quick", within=LIMITED)
    assert told.planted() == {"memlock-low": {()}}
    assert told.status == 2
    (one,) = [one for one in told.body["findings"] if one["name"] == "memlock-low"]
    assert "64 KiB" in one["what"]


@pytest.mark.driver("rxe")
def test_a_gid_that_is_forced_and_not_there(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, _ = ends
    told = alone(near, "--gid-index", "77", "--quick")
    assert told.planted() == {"gid-forced-missing": {(nic.device,) for nic in near}}
    assert told.status == 2
    assert alone(near, "--gid-index", "1", "--quick").planted() == {}


@pytest.mark.driver("siw")
@pytest.mark.each_run
def test_a_gid_index_means_nothing_to_iwarp(ends: tuple[tuple[Nic, ...], ...]) -> None:
    assert alone(ends[0], "--gid-index", "77").planted() == {}


@contextmanager
def unreachable(one: Nic, other: Nic) -> Iterator[None]:
    """Packets from the one to the other go to an address of nobody, as with a switch that drops
    them: no error tells of it. siw's rdma_connect(3) does not return for minutes then."""
    neighbour = ("ip", "neigh", "replace", other.address, "dev", one.netdev, "lladdr")
    mac = Path(f"/sys/class/net/{other.netdev}/address").read_text().strip()
    run(*neighbour, NOBODY, "nud", "permanent")
    try:
        yield
    finally:
        run(*neighbour, mac, "nud", "reachable")


def test_a_pair_of_rails_that_is_not_connected(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, far = ends
    # rxe has a link-local address for each device, too, over which the pair would find a way.
    options = ("--gid-index", "1") if near[0].driver == "rxe" else ()
    with unreachable(near[0], far[1]):
        told = between(near, far, *options)
    assert set(told.planted()) == {"rail-unreachable"}, told.body["findings"]
    (place,) = told.planted()["rail-unreachable"]
    assert [end.partition("@")[0] for end in place] == [near[0].device, far[1].device]
    bad = (near[0].device, far[1].device)
    assert told.stages() == dict.fromkeys(pairs(near, far), "done") | {bad: "connect"}
    assert told.status == 1


def test_mixed_mtus(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, far = ends
    odd = far[0]
    with listening(far) as address:  # which looks again for each check
        run("ip", "link", "set", odd.netdev, "mtu", "1500")
        try:
            local, told = alone(far, "--quick"), alone(near, "--peer", address)
        finally:
            run("ip", "link", "set", odd.netdev, "mtu", "9000")
    assert local.planted() == {"mtu-mixed": {(odd.device,)}}
    assert set(told.planted()) == {"mtu-mixed"}
    (place,) = told.planted()["mtu-mixed"]
    assert [end.partition("@")[0] for end in place] == [odd.device]
    assert told.stages() == dict.fromkeys(pairs(near, far), "done")
    assert (local.status, told.status) == (1, 1)


@pytest.mark.driver("rxe")  # siw's packets are the kernel's TCP, which passes such a switch whole
def test_a_switch_with_a_smaller_mtu(ends: tuple[tuple[Nic, ...], ...]) -> None:
    near, far = ends
    run("ip", "link", "set", far[0].port, "mtu", "1000")
    try:
        told = between(near[:1], far)
    finally:
        run("ip", "link", "set", far[0].port, "mtu", "9000")
    assert set(told.planted()) == {"large-writes-lost"}, told.body["findings"]
    bad = (near[0].device, far[0].device)
    assert told.stages() == dict.fromkeys(pairs(near[:1], far), "done") | {bad: "large"}
