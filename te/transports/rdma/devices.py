# SPDX-License-Identifier: Apache-2.0
"""What RDMA devices tell by themselves: links that go and come back, and things that break.

rxe tells of its port whenever its interface has no carrier, also when the other end of the cable is
down; siw only when the interface itself is set down or up. What breaks further away shows by
completions that fail or do not come.
"""

from __future__ import annotations

import enum
import logging
from typing import Final

from te.transports.base import Local
from te.transports.rdma._core import look_at_qps, nic_failed, nic_returned
from te.transports.rdma.reasons import RailReason
from te.verbs.fabric import Nic

__all__ = ["DeviceEvent", "DeviceWatch", "Meaning", "describe", "meaning"]

logger = logging.getLogger(__name__)


class DeviceEvent(enum.IntEnum):
    """``enum ibv_event_type``; ibv_get_async_event(3)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19


class Meaning(enum.Enum):
    """What follows for rails."""

    #: Rails by the device's port carry nothing any more.
    PORT_DOWN = "its rails are given up"
    DEVICE_FATAL = "its rails are given up for good"
    #: What rails that are down wait for may be there.
    LINK_UP = "rails that are down are tried now"
    #: One queue pair is broken: which, the data plane has been told.
    PAIR_BROKEN = "the rail is given up"
    NOTHING = "nothing follows"


_MEANINGS: Final = {
    DeviceEvent.PORT_ERR: Meaning.PORT_DOWN,
    DeviceEvent.DEVICE_FATAL: Meaning.DEVICE_FATAL,
    DeviceEvent.PORT_ACTIVE: Meaning.LINK_UP,
    # An address that a rail had fails by itself if it is gone; one that it lacked may have come.
    DeviceEvent.GID_CHANGE: Meaning.LINK_UP,
    DeviceEvent.LID_CHANGE: Meaning.LINK_UP,
    DeviceEvent.QP_FATAL: Meaning.PAIR_BROKEN,
    DeviceEvent.QP_REQ_ERR: Meaning.PAIR_BROKEN,
    DeviceEvent.QP_ACCESS_ERR: Meaning.PAIR_BROKEN,
}


def meaning(kind: int, port: int, used_port: int) -> Meaning:
    """What an event of the type ``kind`` (any number), about ``port`` (0: none), means to an engine
    that uses ``used_port`` of the device. Pure."""
    if port not in (0, used_port):
        return Meaning.NOTHING
    return _MEANINGS.get(kind, Meaning.NOTHING)  # type: ignore[call-overload,no-any-return]


def describe(kind: int, port: int) -> str:
    """The event, for the log. Pure."""
    name = DeviceEvent(kind).name if kind in list(DeviceEvent) else f"event {kind}"
    return f"{name} of port {port}" if port else name


class DeviceWatch:
    """Acts on one device's events. Belongs to the loop's thread."""

    def __init__(self, local: Local, nic: Nic) -> None:
        self._local = local
        self._nic = nic

    def on_ready(self, _events: int) -> None:
        """Handler for the loop."""
        for kind, port in self._nic.device.events():
            found = meaning(kind, port, self._nic.port)
            level = logging.INFO if found in (Meaning.NOTHING, Meaning.LINK_UP) else logging.WARNING
            logger.log(level, "%s tells %s: %s", self._nic.name, describe(kind, port), found.value)
            self._act(found)

    def _act(self, found: Meaning) -> None:
        match found:
            case Meaning.PORT_DOWN:
                nic_failed(self._local.plane, self._nic.index, RailReason.PORT_DOWN)
            case Meaning.DEVICE_FATAL:
                nic_failed(self._local.plane, self._nic.index, RailReason.DEVICE_FATAL)
            case Meaning.PAIR_BROKEN:
                look_at_qps(self._local.plane)
            case Meaning.LINK_UP:
                nic_returned(self._local.plane, self._nic.index)
