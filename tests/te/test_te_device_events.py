# SPDX-License-Identifier: Apache-2.0
"""What an event of an RDMA device means for rails. (That devices tell: tests/rdma.)"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te.transports.rdma.devices import DeviceEvent, Meaning, describe, meaning

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("event", "port", "expected"),
    [
        (DeviceEvent.PORT_ERR, 1, Meaning.PORT_DOWN),
        (DeviceEvent.PORT_ERR, 2, Meaning.NOTHING),
        (DeviceEvent.PORT_ACTIVE, 1, Meaning.LINK_UP),
        (DeviceEvent.PORT_ACTIVE, 2, Meaning.NOTHING),
        (DeviceEvent.GID_CHANGE, 0, Meaning.LINK_UP),
        (DeviceEvent.DEVICE_FATAL, 0, Meaning.DEVICE_FATAL),
        (DeviceEvent.QP_FATAL, 0, Meaning.PAIR_BROKEN),
        (DeviceEvent.SQ_DRAINED, 0, Meaning.NOTHING),
    ],
)
def test_meaning(event: DeviceEvent, port: int, expected: Meaning) -> None:
    assert meaning(event, port, 1) is expected


@given(st.integers(-1, 1000), st.integers(0, 3), st.integers(1, 3))
def test_any_number_means_something_and_other_ports_nothing(
    kind: int, port: int, used: int
) -> None:
    found = meaning(kind, port, used)
    if port not in (0, used) or kind not in list(DeviceEvent):
        assert found is Meaning.NOTHING
    text = describe(kind, port)
    assert text.isprintable()
    assert (f"port {port}" in text) == (port > 0)
