# SPDX-License-Identifier: Apache-2.0
"""What the other tests here rely on: the links are real, and faults can be given by name."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from testbed_nics import Nic, cut, run, shaped, wait_for

pytestmark = pytest.mark.rdma

MIB = 1 << 20
WAIT_S = 60.0
TBF = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")


def send(source: Nic, target: Nic, nbytes: int) -> None:
    """Bytes over TCP from one NIC's address to another's."""
    with socket.create_server((target.address, 0)) as server:

        def take() -> None:
            taken, _ = server.accept()
            with taken:
                while taken.recv(MIB):
                    pass

        taker = threading.Thread(target=take)
        taker.start()
        bound = (source.address, 0)
        with socket.create_connection(server.getsockname(), WAIT_S, bound) as connection:
            connection.sendall(bytes(nbytes))
        taker.join(WAIT_S)
        assert not taker.is_alive()


def test_the_testbed_says_that_it_is_one(rdma_nics: tuple[Nic, ...]) -> None:
    assert os.environ["RDMA_TESTBED"] == "1"
    assert [nic.state() for nic in rdma_nics] == ["ACTIVE"] * len(rdma_nics)
    assert len({nic.driver for nic in rdma_nics}) == 1


def test_traffic_between_two_nics_crosses_their_wires(rdma_nics: tuple[Nic, ...]) -> None:
    first, second = rdma_nics[:2]
    before = first.wire_bytes("tx"), second.wire_bytes("rx")
    send(first, second, MIB)
    assert first.wire_bytes("tx") - before[0] > MIB
    assert second.wire_bytes("rx") - before[1] > MIB


def test_links_go_down_and_come_back(rdma_nics: tuple[Nic, ...]) -> None:
    nic = rdma_nics[1]
    with cut(nic.netdev):
        wait_for(lambda: nic.state() == "DOWN", WAIT_S, f"{nic.device} down")
    wait_for(lambda: nic.state() == "ACTIVE", WAIT_S, f"{nic.device} up again")
    routes = ("ip", "route", "show", "table", str(100 + nic.index))
    wait_for(lambda: run(*routes).count(nic.netdev) == 2, WAIT_S, "its own routes are back")
    before = nic.wire_bytes("tx")
    send(nic, rdma_nics[0], MIB)
    assert nic.wire_bytes("tx") - before > MIB


def test_a_link_can_be_slowed(rdma_nics: tuple[Nic, ...]) -> None:
    first, second = rdma_nics[:2]
    with shaped(first.netdev, *TBF):
        assert "tbf" in run("tc", "qdisc", "show", "dev", first.netdev)
        send(first, second, 4 * MIB)
    assert "tbf" not in run("tc", "qdisc", "show", "dev", first.netdev)
