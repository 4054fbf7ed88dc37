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
from te.verbs.dialing import within
from te.verbs.fabric import Nic

__all__ = [
    "BUILD_TIMEOUT_S",
    "Greet",
    "Path",
    "accept_rail",
    "add_queue_pair",
    "build_rail",
    "paths",
    "remote_nic",
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

    nic: Nic
    remote: int
    gids: tuple[Gid, Gid] | None

    def __str__(self) -> str:
        if self.gids is None:
            return f"{self.nic.name} to device {self.remote}"
        return (
            f"{self.nic.name} ({self.gids[0].text}) to device {self.remote} ({self.gids[1].text})"
        )


def paths(
    nics: tuple[Nic, ...], remote: list[CardNic], per_pair: int, rails_max: int
) -> list[list[Path]]:
    """For each rail the ways to try, the likeliest first; rails without any are left out.

    Each pair of devices has ``per_pair`` rails, but as many as ``rails_max`` allows in all: every
    pair has its first before one has a second.
    """
    found = []
    for nic_index, remote_index in (pairs(len(nics), len(remote)) * per_pair)[:rails_max]:
        nic = nics[nic_index]
        ways: list[Path] = []
        for other in sorted(partners(nic_index, len(remote)), key=lambda i: i != remote_index):
            ways += _between(nic, other, remote[other])
        if ways:
            found.append(ways)
    return found


def _between(nic: Nic, index: int, remote: CardNic) -> list[Path]:
    if nic.family != remote.family:
        return []
    if nic.family == "ib":
        return [Path(nic, index, None)]
    return [Path(nic, index, one) for one in gid_pairs(nic.gids, remote.gids)]


def build_rail(
    local: Local,
    link: RdmaLink,
    remote: CardNic,
    rail: int,
    epoch: int,
    path: Path,
    greet: Greet,
) -> None:
    """Makes this side's end, has the destination make its own, connects them and hands this one to
    the plane, which probes it. ``remote`` is the destination's device of the path. ``OSError``,
    ``te.ConnectError``."""
    path.nic.check_port()
    if path.nic.family == "iwarp":
        _dial_rail(link, rail, epoch, path, greet)
        return
    nic = path.nic
    queue_pair = nic.device.queue_pair(nic.port, SEND_DEPTH, 1, nic.max_message_bytes)
    psn = secrets.randbits(PSN_BITS)
    offer = RailOffer(
        rail=rail,
        epoch=epoch,
        nic=nic.index,
        remote_nic=path.remote,
        number=queue_pair.number,
        psn=psn,
        lid=nic.lid,
        mtu=min(nic.mtu, remote.mtu),
        gid=path.gids[0].raw if path.gids else b"",
        remote_gid_index=path.gids[1].index if path.gids else 0,
    )
    answer = greet(offer)
    queue_pair.connect(
        answer.number,
        answer.psn,
        psn,
        path.gids[1].raw if path.gids else b"",
        path.gids[0].index if path.gids else 0,
        remote.lid,
        offer.mtu,
        ACK_TIMEOUT,
        RETRIES,
        local.config.traffic_class,
        local.config.service_level,
        local.config.partition_key_index,
        is_target=False,
    )
    add_queue_pair(queue_pair, link, offer, nic.index, path.remote, answer.fences)


def _dial_rail(link: RdmaLink, rail: int, epoch: int, path: Path, greet: Greet) -> None:
    """``build_rail`` by rdma_cm: the answer says where to dial, and the destination's part of the
    connection how often the link was fenced before it."""
    deadline_s = time.monotonic() + BUILD_TIMEOUT_S
    nic = path.nic
    assert path.gids is not None
    offer = RailOffer(
        rail=rail,
        epoch=epoch,
        nic=nic.index,
        remote_nic=path.remote,
        gid=path.gids[0].raw,
        remote_gid_index=path.gids[1].index,
    )
    answer = greet(offer)
    if not answer.port:
        raise ConnectError("the engine welcomed a rail without its end of it")
    local, remote = path.gids[0].raw, path.gids[1].raw
    queue_pair, said = within(
        lambda left_s: nic.device.dial(
            local, remote, answer.port, answer.token, SEND_DEPTH, nic.max_message_bytes, left_s
        ),
        "rdma_connect",
        deadline_s - time.monotonic(),
    )
    if len(said) < FENCES.size:
        raise ConnectError("the engine answered rdma_connect without its fences")
    add_queue_pair(queue_pair, link, offer, nic.index, path.remote, FENCES.unpack_from(said)[0])


def accept_rail(local: Local, link: RdmaLink, offer: RailOffer, nic: Nic, hello: int) -> RailAnswer:
    """The destination's part of ``build_rail``, for the hello of that number; ``OSError``."""
    queue_pair = nic.device.queue_pair(nic.port, 1, RECEIVE_DEPTH, nic.max_message_bytes)
    psn = secrets.randbits(PSN_BITS)
    queue_pair.connect(
        offer.number,
        offer.psn,
        psn,
        offer.gid,
        offer.remote_gid_index,
        offer.lid,
        offer.mtu,
        ACK_TIMEOUT,
        RETRIES,
        local.config.traffic_class,
        local.config.service_level,
        local.config.partition_key_index,
        is_target=True,
    )
    number = queue_pair.number
    add_queue_pair(queue_pair, link, offer, offer.remote_nic, offer.nic, 0, hello)
    # Read last: a fence that came before this rail was there must be known before it is used.
    return RailAnswer(number=number, psn=psn, fences=link.fences)


def remote_nic(nics: tuple[Nic, ...], offer: RailOffer) -> Nic:
    """Which of the destination's devices a source wants, if its port has a link; ``OSError``."""
    if offer.remote_nic >= len(nics):
        raise OSError(errno.ENODEV, f"there is no device {offer.remote_nic} here, but {len(nics)}")
    nics[offer.remote_nic].check_port()
    return nics[offer.remote_nic]


def add_queue_pair(
    queue_pair: QueuePair,
    link: RdmaLink,
    offer: RailOffer,
    nic: int,
    remote: int,
    fences: int,
    hello: int = 0,
) -> None:
    """Gives a queue pair to the plane; ``OSError``. See ``RdmaLink.add_qp``."""
    link.add_qp(queue_pair.address, offer.rail, offer.epoch, nic, remote, fences, hello)
    queue_pair.disown()
