# SPDX-License-Identifier: Apache-2.0
"""The contract over RDMA: devices on the card, a connection for words, queue pairs for bytes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
import weakref
from typing import ClassVar

from te.config import Config
from te.connect.dial import add_rails, address_text, connect, hello_to, tune
from te.connect.greeting import Hello
from te.core.wire import RAILS_LIMIT
from te.errors import ConnectError, DeviceError
from te.handshake import Card, decode_body, encode
from te.memory_kinds import Reach
from te.topology import GidKind
from te.transports.base import (
    Accepted,
    Call,
    Capabilities,
    IncomingLink,
    Local,
    OutgoingLink,
    PlainJoin,
    Transport,
    TransportRefused,
    Watch,
    Work,
)
from te.transports.rdma._core import RdmaLink, rail_changes
from te.transports.rdma.cm import CmAcceptor
from te.transports.rdma.devices import DeviceWatch
from te.transports.rdma.direct import BUILD_TIMEOUT_S, accept_rail, paths, remote_nic
from te.transports.rdma.link import RailedLink
from te.transports.rdma.messages import (
    CardNic,
    RailAnswer,
    RailOffer,
    RdmaHello,
    RdmaOffer,
    RdmaWelcome,
)
from te.verbs.fabric import Fabric, Nic, open_fabric

__all__ = ["Rdma"]

logger = logging.getLogger(__name__)


class Rdma(Transport):
    """The devices of an engine, and its links by them."""

    name: ClassVar = "rdma"
    capabilities: ClassVar = Capabilities(
        touches=Reach.NIC,
        is_private=False,
        connections_max=1,
    )

    _local: Local
    _cm: CmAcceptor

    def __init__(self, config: Config, fabric: Fabric | None = None) -> None:
        """``fabric``: devices that are open already; else those of the machine."""
        self.fabric = fabric
        self._problem: str | None = None
        #: Numbers of hellos that ask for rails; the accepting thread's.
        self._hellos = itertools.count(1)
        #: Those that this engine has opened, by the plane's number.
        self._links: weakref.WeakValueDictionary[int, RailedLink] = weakref.WeakValueDictionary()
        if fabric is None:
            try:
                self.fabric = open_fabric(
                    config.nics, config.topology, config.gid_index, config.partition_key_index
                )
            except DeviceError as exc:
                self._problem = str(exc)

    def probe(self) -> str | None:
        """Why there are no devices."""
        return self._problem

    def start(self, local: Local, watch: Watch) -> tuple[()]:
        """Listens to the devices."""
        self._local = local
        self._cm = CmAcceptor(local, watch)
        for sentence in _idle_settings(local.config, self._nics):
            logger.warning("%s", sentence)
        for nic in self._nics:
            watch(nic.device.events_fd, DeviceWatch(local, nic).on_ready)
        return ()

    def offer(self) -> bytes | None:
        """The devices and their addresses."""
        if self.fabric is None:
            return None
        return encode(
            RdmaOffer(
                nics=[
                    CardNic(
                        name=nic.name,
                        family=nic.family,
                        lid=nic.lid,
                        mtu=nic.mtu,
                        gids=list(nic.gids),
                    )
                    for nic in self._nics
                ]
            )
        )

    @property
    def rail_changes(self) -> tuple[int, int]:
        return rail_changes(self._local.plane)

    def on_event(self, number: int) -> None:
        """Has rails made that their link asks for."""
        link = self._links.get(number)
        if link is not None:
            link.look()

    def close(self, timeout_s: float) -> None:
        """Expects no source by rdma_cm any more."""
        self._cm.close()

    @property
    def _nics(self) -> tuple[Nic, ...]:
        return () if self.fabric is None else self.fabric.nics

    # -- the source's side

    def open(self, card: Card, offer: bytes, deadline_s: float, timeout_s: float) -> OutgoingLink:
        """See ``Transport.open``."""
        local, nics, there = self._local, self._nics, decode_body(offer, RdmaOffer).nics
        ways = paths(nics, there, local.config.rails_per_nic, RAILS_LIMIT)
        if not ways:
            raise TransportRefused(
                f"no device of one side can be connected with one of the other: here"
                f" {', '.join(f'{one.name} ({one.family})' for one in nics)}, there"
                f" {', '.join(f'{one.name} ({one.family})' for one in there) or 'none'}",
                for_good=True,
            )
        number = secrets.randbits(62)
        first = connect(local, card, self._hello(card, number), deadline_s, timeout_s)

        def greet(rail: RailOffer) -> RailAnswer:
            until_s = time.monotonic() + BUILD_TIMEOUT_S
            hello = self._hello(card, number, rail)
            dialled = connect(local, card, hello, until_s, BUILD_TIMEOUT_S, first.session)
            dialled.close()
            answer = decode_body(dialled.welcome.body, RdmaWelcome).rail
            if answer is None:
                raise ConnectError("the engine welcomed a rail without its end of it")
            return answer

        link = RailedLink(RdmaLink(local.plane, False), local, card.id, there, greet, ways)
        self._links[link.handle.number] = link
        add_rails(first, lambda _: first, 1, lambda one: link.handle.add_connection(one.fileno()))
        with contextlib.ExitStack() as undo:
            undo.callback(link.close)
            problem = link.await_rails(deadline_s)
            if problem is None:
                undo.pop_all()
        if problem is not None:
            where = address_text(card.host, card.port)
            raise TransportRefused(f"no rail to {where} works: {problem}{_lacking(nics, there)}")
        return link

    def _hello(self, card: Card, number: int, rail: RailOffer | None = None) -> Hello:
        return hello_to(card, self._local, self.name, number, encode(RdmaHello(rail=rail)))

    # -- the destination's side

    def accept(self, call: Call, link: IncomingLink | None) -> Accepted:
        """See ``Transport.accept``."""
        rail = decode_body(call.body, RdmaHello).rail
        if rail is None:
            tune(call.sock, self._local.config.stall_timeout_s)
            plane = self._local.plane
            welcome = encode(RdmaWelcome())
            return PlainJoin(self, call, lambda: RdmaLink(plane, True), _give, welcome)
        if link is None:
            raise TransportRefused("no such link")
        handle = link.handle
        assert isinstance(handle, RdmaLink)
        hello = next(self._hellos)
        return Work(f"making rail {rail.rail}", lambda: self._make_rail(handle, rail, hello))

    def _make_rail(self, link: RdmaLink, offer: RailOffer, hello: int) -> bytes:
        """This side's end of a rail, for the hello of that number; ``OSError``. Blocks while the
        kernel looks for the other side's hardware address (a second, if an ARP request is lost)."""
        nic = remote_nic(self._nics, offer)
        if nic.family == "iwarp":
            answer = self._cm.expect(link, offer, nic, hello)
        else:
            answer = accept_rail(self._local, link, offer, nic, hello)
        return encode(RdmaWelcome(rail=answer))


def _idle_settings(config: Config, nics: tuple[Nic, ...]) -> list[str]:
    """What was configured and says nothing to some of the devices."""
    of_packets = ("traffic_class", "service_level", "partition_key_index", "gid_index")
    # The settings that mean nothing to devices of a family, and why.
    idle = {
        "iwarp": (of_packets, "iWARP connects by rdma_cm and is TCP to the network"),
        "ib": (("gid_index",), "within an InfiniBand subnet no GID is used"),
    }
    found = []
    for family, (fields, why) in idle.items():
        names = [nic.name for nic in nics if nic.family == family]
        given = [
            f"{field}={getattr(config, field)}"
            for field in fields
            if getattr(config, field) != getattr(Config, field)
        ]
        if names and given:
            found.append(f"{', '.join(given)}: no effect on {', '.join(names)}: {why}")
    return found


def _lacking(nics: tuple[Nic, ...], there: list[CardNic]) -> str:
    """Which devices have no address that a network would carry, and the fix."""
    sides = [(one.name, one.netdev, one.gids) for one in nics]
    sides += [(f"{one.name} there", "its interface", tuple(one.gids)) for one in there]
    return "".join(
        f"; {name} has a link-local address alone: give {netdev or 'its interface'} one of the"
        " network (ip address add …)"
        for name, netdev, gids in sides
        if gids and all(gid.kind is GidKind.LINK_LOCAL for gid in gids)
    )


def _give(link: IncomingLink, fd: int) -> bool:
    assert isinstance(link.handle, RdmaLink)
    return link.handle.add_connection(fd)
