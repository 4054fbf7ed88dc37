# SPDX-License-Identifier: Apache-2.0
"""Connections by rdma_cm, which devices of the iWARP family need."""

from __future__ import annotations

import pytest
from rdma_pair import TIMEOUT_S, rdma_pair
from testbed_nics import Nic

import te
from te.topology import read_addresses
from te.verbs import _core as verbs

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.driver("siw"),
    pytest.mark.each_run,
    pytest.mark.usefixtures("patient_rails"),
]

MIB = 1 << 20


def address(nic: Nic) -> bytes:
    return read_addresses(nic.netdev)[0].raw


@pytest.mark.parametrize("token", [b"", b"x" * 28, b"y" * 64])
def test_a_connection_that_nobody_expects_is_rejected(
    rdma_nics: tuple[Nic, ...], token: bytes
) -> None:
    with rdma_pair(rdma_nics, 1, MIB) as pair:
        (listener,) = pair.target._transports.get("rdma")._cm._listeners.values()
        near, far = pair.near[0], pair.far[0]
        with pytest.raises(OSError, match="RDMA_CM_EVENT_REJECTED"):
            verbs.Device(near.device).dial(
                address(near), address(far), listener.port, token, 1, MIB, TIMEOUT_S
            )
        assert pair.peer.write(pair.blocks([0], [0], MIB)).wait(TIMEOUT_S) is te.Status.DONE
        assert (pair.dst == pair.src).all()


def test_dialling_where_nobody_listens_fails_in_time(rdma_nics: tuple[Nic, ...]) -> None:
    near, far = rdma_nics[:2]
    with pytest.raises(OSError, match="rdma_connect"):
        verbs.Device(near.device).dial(address(near), address(far), 9, b"", 1, MIB, TIMEOUT_S)


def test_a_connection_goes_through_the_device_that_was_asked_for(
    rdma_nics: tuple[Nic, ...],
) -> None:
    near, far = rdma_nics[:2]
    with pytest.raises(OSError, match=f"does not go through {far.device}"):
        verbs.Device(far.device).dial(address(near), address(far), 9, b"", 1, MIB, TIMEOUT_S)
