# SPDX-License-Identifier: Apache-2.0
"""What is configured of packets and addresses, as the devices' own drivers have it."""

from __future__ import annotations

import ctypes
import logging
import struct
from typing import Any

import pytest
from rdma_pair import TIMEOUT_S, rdma_pair
from testbed_nics import Nic, wait_for

import te
from te.transports.rdma import direct
from te.verbs.fabric import open_fabric

pytestmark = [pytest.mark.rdma, pytest.mark.usefixtures("patient_rails")]

MIB = 1 << 20
EVERYTHING = (1 << 21) - 1  # bits of enum ibv_qp_attr_mask, ibv_query_qp(3)
#: Of struct ibv_qp_attr: where its address handle begins, and two fields behind.
AH, PKEY_INDEX = 56, 120
SGID_INDEX, TRAFFIC_CLASS = AH + 20, AH + 22


def attributes(queue_pair: direct.QueuePair) -> bytes:
    """struct ibv_qp_attr, as the kernel has it."""
    verbs = ctypes.CDLL("libibverbs.so.1")
    # The queue pair is the first field of struct Endpoint (te/verbs/abi.h).
    qp = ctypes.c_void_p(ctypes.c_void_p.from_address(queue_pair.address).value)
    attr, init = ctypes.create_string_buffer(144), ctypes.create_string_buffer(64)
    assert verbs.ibv_query_qp(qp, attr, EVERYTHING, init) == 0
    return attr.raw


@pytest.fixture
def queried(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The attributes of each queue pair, both ends, when it is handed over."""
    found: list[bytes] = []
    add_queue_pair = direct.add_queue_pair

    def look(queue_pair: direct.QueuePair, *arguments: Any) -> None:
        found.append(attributes(queue_pair))
        add_queue_pair(queue_pair, *arguments)

    monkeypatch.setattr(direct, "add_queue_pair", look)
    return found


def gid_indices(nic: Nic) -> list[int]:
    """Of RoCE v2."""
    fabric = open_fabric((nic.device,), None)
    found = [gid.index for gid in fabric.nics[0].gids if gid.roce == 2]
    fabric.close()
    return found


@pytest.mark.driver("rxe")
def test_the_traffic_class_is_on_both_ends_of_each_rail(
    rdma_nics: tuple[Nic, ...], queried: list[bytes]
) -> None:
    with rdma_pair(rdma_nics, 1, MIB, traffic_class=106, service_level=3, rails_per_nic=2) as pair:
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
        assert (pair.dst == pair.src).all()
        wait_for(lambda: len(queried) == 4, TIMEOUT_S, "both ends of two rails are made")
    assert [one[TRAFFIC_CLASS] for one in queried] == [106] * 4
    assert [struct.unpack_from("<H", one, PKEY_INDEX)[0] for one in queried] == [0] * 4


@pytest.mark.driver("rxe")
def test_the_gid_that_is_configured_is_used_and_no_other(
    rdma_nics: tuple[Nic, ...], queried: list[bytes]
) -> None:
    """Each of the table: link-local ones reach the other device, too."""
    for index in gid_indices(rdma_nics[0]):
        queried.clear()
        with rdma_pair(rdma_nics, 1, MIB, gid_index=index) as pair:
            assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
            assert (pair.dst == pair.src).all()
        assert [one[SGID_INDEX] for one in queried] == [index] * 2


@pytest.mark.driver("rxe")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gid_index": 200}, "gid_index=200 is no RoCE v2 GID of its port 1, which has "),
        ({"partition_key_index": 65535}, "partition_key_index=65535, but its port 1 has "),
    ],
)
def test_an_entry_that_no_device_has_is_refused_with_what_there_is(
    rdma_nics: tuple[Nic, ...], settings: dict[str, int], says: str
) -> None:
    config = te.Config(transports=("rdma",), nics=(rdma_nics[0].device,), **settings)  # type: ignore[arg-type]
    with pytest.raises(te.DeviceError, match=says):
        te.Engine(config)


@pytest.mark.driver("siw")
@pytest.mark.each_run
def test_iwarp_goes_on_and_says_what_has_no_effect(
    rdma_nics: tuple[Nic, ...], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"traffic_class": 106, "gid_index": 200, "rails_per_nic": 2}
    with (
        caplog.at_level(logging.WARNING),
        rdma_pair(rdma_nics, 1, MIB, **settings) as pair,
    ):
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
        assert (pair.dst == pair.src).all()
    said = [one.getMessage() for one in caplog.records if "no effect" in one.getMessage()]
    assert len(said) == 2  # each engine
    assert said[0].startswith("traffic_class=106, gid_index=200: no effect on siw")


@pytest.mark.driver("siw")
@pytest.mark.each_run
def test_iwarp_listens_on_a_port_of_the_range(rdma_nics: tuple[Nic, ...]) -> None:
    first, last = 21_000, 21_031
    with rdma_pair(rdma_nics, 2, MIB, port=first, port_last=last) as pair:
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
        listeners = pair.target._transports.get("rdma")._cm._listeners.values()  # type: ignore[attr-defined]
        ports = [one.port for one in listeners]
        assert len(ports) == 2
        assert all(first <= port <= last for port in ports)
