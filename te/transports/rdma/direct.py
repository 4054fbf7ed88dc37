# SPDX-License-Identifier: Apache-2.0
"""Rails over RDMA: making both ends of one.

Queue pairs of InfiniBand and RoCE are connected with what the greetings say of them. Those of iWARP
need a connection by rdma_cm first: the destination listens (``cm``), the source dials.
"""

from __future__ import annotations

import errno
import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from te.core.wire import RECEIVE_DEPTH
from te.errors import ConnectError
from te.topology import Gid, gid_pairs
from te.transports.base import Local
from te.transports.rdma._core import RdmaLink
from te.transports.rdma.messages import CardNic, RailAnswer, RailOffer
from te.transports.rdma.striping import pairs, partners
from te.verbs._core import QueuePair
from te.verbs.fabric import Nic

__all__ = [
    "BUILD_TIMEOUT_S",
    "Greet",
    "Path",
    "accept_rail",
    "build_rail",
    "far_nic",
    "hand_over",
    "paths",
]

SEND_DEPTH = 512
# ibv_modify_qp(3): 4.096 us x 2^14 = 67 ms until a packet is sent again, so many times. Seven means
# for ever on some devices (rxe).
ACK_TIMEOUT = 14
RETRIES = 5
PSN_BITS = 24

BUILD_TIMEOUT_S = 2.0
"""Making a rail blocks for a round trip, or until this deadline if the peer is gone; and while the
kernel looks for a hardware address, which takes a second if an ARP request is lost. An attempt that
began before a link was back may have to end before one succeeds: siw dials with the kernel's
TCP, which sends after 1, 3, 7 s."""


Greet: TypeAlias = Callable[[RailOffer], RailAnswer]
"""Makes a connection that offers this end of a rail, and returns the other. ``OSError``,
``te.ConnectError``."""

FENCES = struct.Struct("<Q")
"""What the destination says with its part of a connection by rdma_cm."""


@dataclass(frozen=True)
class Path:
    """A way that a rail could take: devices of both sides, and their addresses where the network
    has any."""

    near: Nic
    far: int
    gids: tuple[Gid, Gid] | None

    def __str__(self) -> str:
        if self.gids is None:
            return f"{self.near.name} to device {self.far}"
        return f"{self.near.name} ({self.gids[0].text}) to device {self.far} ({self.gids[1].text})"


def paths(nics: tuple[Nic, ...], far: list[CardNic], rails_max: int) -> list[list[Path]]:
    """For each rail the ways to try, the likeliest first; rails without any are left out."""
    if not nics or not far:
        return []
    found = []
    for near_index, far_index in pairs(len(nics), len(far))[:rails_max].tolist():
        near = nics[near_index]
        ways: list[Path] = []
        for other in sorted(partners(near_index, len(far)), key=lambda i: i != far_index):
            ways += _between(near, other, far[other])
        if ways:
            found.append(ways)
    return found


def _between(near: Nic, index: int, far: CardNic) -> list[Path]:
    if near.family != far.family:
        return []
    if near.family == "ib":
        return [Path(near, index, None)]
    return [Path(near, index, one) for one in gid_pairs(near.gids, far.gids)]


def build_rail(
    local: Local,
    link: RdmaLink,
    far: CardNic,
    rail: int,
    epoch: int,
    path: Path,
    greet: Greet,
) -> None:
    """Makes this side's end, has the destination make its own, connects them and hands this one to
    the plane, which probes it. ``far`` is the destination's device of the path. ``OSError``,
    ``te.ConnectError``."""
    path.near.check_port()
    if path.near.family == "iwarp":
        _dial_rail(link, rail, epoch, path, greet)
        return
    near = path.near
    queue_pair = near.device.queue_pair(near.port, SEND_DEPTH, 1, near.max_message_bytes)
    psn = secrets.randbits(PSN_BITS)
    offer = RailOffer(
        rail=rail,
        epoch=epoch,
        near_nic=near.index,
        far_nic=path.far,
        number=queue_pair.number,
        psn=psn,
        lid=near.lid,
        mtu=min(near.mtu, far.mtu),
        gid=path.gids[0].raw if path.gids else b"",
        far_gid_index=path.gids[1].index if path.gids else 0,
    )
    answer = greet(offer)
    queue_pair.connect(
        answer.number,
        answer.psn,
        psn,
        path.gids[1].raw if path.gids else b"",
        path.gids[0].index if path.gids else 0,
        far.lid,
        offer.mtu,
        ACK_TIMEOUT,
        RETRIES,
        local.config.traffic_class,
        is_target=False,
    )
    hand_over(queue_pair, link, offer, near.index, path.far, answer.fences)


def _dial_rail(link: RdmaLink, rail: int, epoch: int, path: Path, greet: Greet) -> None:
    """``build_rail`` by rdma_cm: the answer says where to dial, and the destination's part of the
    connection how often the link was fenced before it."""
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    near = path.near
    assert path.gids is not None
    offer = RailOffer(
        rail=rail,
        epoch=epoch,
        near_nic=near.index,
        far_nic=path.far,
        gid=path.gids[0].raw,
        far_gid_index=path.gids[1].index,
    )
    answer = greet(offer)
    if not answer.port:
        raise ConnectError("the engine welcomed a rail without its end of it")
    queue_pair, said = near.device.dial(
        path.gids[0].raw,
        path.gids[1].raw,
        answer.port,
        answer.token,
        SEND_DEPTH,
        near.max_message_bytes,
        deadline_s - time.monotonic(),
    )
    if len(said) < FENCES.size:
        raise ConnectError("the engine answered rdma_connect without its fences")
    hand_over(queue_pair, link, offer, near.index, path.far, FENCES.unpack_from(said)[0])


def accept_rail(local: Local, link: RdmaLink, offer: RailOffer, nic: Nic) -> RailAnswer:
    """The destination's part of ``build_rail``; ``OSError``."""
    queue_pair = nic.device.queue_pair(nic.port, 1, RECEIVE_DEPTH, nic.max_message_bytes)
    psn = secrets.randbits(PSN_BITS)
    queue_pair.connect(
        offer.number,
        offer.psn,
        psn,
        offer.gid,
        offer.far_gid_index,
        offer.lid,
        offer.mtu,
        ACK_TIMEOUT,
        RETRIES,
        local.config.traffic_class,
        is_target=True,
    )
    number = queue_pair.number
    hand_over(queue_pair, link, offer, offer.far_nic, offer.near_nic, 0)
    # Read last: a fence that came before this rail was there must be known before it is used.
    return RailAnswer(number=number, psn=psn, fences=link.fences)


def far_nic(nics: tuple[Nic, ...], offer: RailOffer) -> Nic:
    """Which of the destination's devices a source wants, if its port has a link; ``OSError``."""
    if offer.far_nic >= len(nics):
        raise OSError(errno.ENODEV, f"there is no device {offer.far_nic} here, but {len(nics)}")
    nics[offer.far_nic].check_port()
    return nics[offer.far_nic]


def hand_over(
    queue_pair: QueuePair, link: RdmaLink, offer: RailOffer, near: int, far: int, fences: int
) -> None:
    """Gives a queue pair to the plane; ``OSError``."""
    link.add_qp(queue_pair.address, offer.rail, offer.epoch, near, far, fences)
    queue_pair.disown()
