# SPDX-License-Identifier: Apache-2.0
"""Opening a link: the first transport that works, and as many rails as both sides want."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from te.errors import ConnectError, Error
from te.handshake import Card, Hello, RailOffer, Shared, Welcome
from te.links import samehost
from te.links.dial import Dialled, TransportRefused, address_text, blame, greet, insist, tune
from te.links.direct import BUILD_TIMEOUT_S, paths
from te.links.keeper import DirectLink
from te.links.local import Local, SharedMemory
from te.links.process import peer_pid, peer_process
from te.links.sharing import Say, Shares
from te.plane._core import RAILS_LIMIT, LinkHandle
from te.plane.reasons import Reason
from te.topology import GidKind
from te.verbs.fabric import Nic

__all__ = ["Opened", "open_link"]


@dataclass(frozen=True)
class Opened:
    """A link with all its rails."""

    link: LinkHandle
    transport: str
    #: Why no preferred transport was taken; empty when the first choice works.
    reason: str
    #: Its rails, if they are over RDMA.
    direct: DirectLink | None = None


def open_link(local: Local, card: Card, timeout_s: float) -> Opened:
    """Blocks for at most ``timeout_s``; ``te.ConnectError``, ``te.VersionError``,
    ``te.HandshakeError``."""
    deadline_s = time.monotonic() + timeout_s
    if not set(local.config.transports) & set(card.transports):
        raise ConnectError(
            f"no common transport: the engine {card.id} offers {', '.join(card.transports)},"
            f" this one {', '.join(local.config.transports)}"
        )
    reasons: list[str] = []
    for name in local.config.transports:
        if name not in card.transports:
            reasons.append(f"{name}: the other engine does not offer it")
            continue
        try:
            opened = _OPENERS[name](local, card, deadline_s, timeout_s)
        except TransportRefused as exc:
            reasons.append(f"{name}: {exc}")
            continue
        return replace(opened, reason="; ".join(reasons))
    raise ConnectError(
        f"no transport to the engine {card.id} at {address_text(card.host, card.port)}:"
        f" {'; '.join(reasons)}"
    )


def _hello(local: Local, card: Card, number: int) -> Hello:
    return Hello(
        id=local.id, epoch=local.epoch, peer_id=card.id, peer_epoch=card.epoch, link=number
    )


def _open_tcp(local: Local, card: Card, deadline_s: float, timeout_s: float) -> Opened:
    number = secrets.randbits(62)
    hello = _hello(local, card, number)

    def dial() -> Dialled:
        return _dial_tcp(local, card, hello, deadline_s, timeout_s)

    link = local.plane.link(False, False, 0)
    _add_rails(link, dial(), dial, local.config.rails)
    return Opened(link, "tcp", "")


def _open_samehost(local: Local, card: Card, deadline_s: float, timeout_s: float) -> Opened:
    where = f"the abstract socket of {card.id}"
    number, memory = secrets.randbits(62), samehost.NonceMemory()
    hello = _hello(local, card, number)

    def dial_once(nonce: bool) -> Dialled:
        left_s = max(deadline_s - time.monotonic(), 0.001)
        with contextlib.ExitStack() as undo:
            try:
                sock = samehost.dial(card, left_s)
            except (ConnectionRefusedError, PermissionError):
                raise TransportRefused(f"no engine {card.id} on this host") from None
            undo.callback(sock.close)
            problem = samehost.READERS.allow(peer_pid(sock))
            if problem is not None:
                raise TransportRefused(problem)
            rings_fd = samehost.make_rings()
            undo.callback(os.close, rings_fd)
            said = structs.replace(hello, nonce=memory.nonce) if nonce else hello
            dialled = greet(sock, said, card, where, deadline_s, [rings_fd])
            undo.pop_all()
            return replace(dialled, rings_fd=rings_fd)

    def dial(nonce: bool = False) -> Dialled:
        with blame(card, where, timeout_s):
            return insist(lambda: dial_once(nonce), deadline_s)

    first = dial(nonce=True)
    with contextlib.ExitStack() as undo, blame(card, where, timeout_s):
        undo.callback(first.close)
        process = peer_process(first.sock)
        if isinstance(process, str):
            raise TransportRefused(process)
        undo.callback(process.close)
        problem = samehost.cannot_read(process, first.welcome.nonce)
        if problem is not None:
            raise TransportRefused(problem)
        link = local.plane.link(False, True, process.pid, False, process.pidfd)
        undo.pop_all()
    _add_rails(link, first, dial, local.config.rails)
    local.sharing.attach(Shares(link, _about_memory(local, card, number)), deadline_s)
    return Opened(link, "samehost", "")


def _open_rdma(local: Local, card: Card, deadline_s: float, timeout_s: float) -> Opened:
    where = address_text(card.host, card.port)
    if local.fabric is None:
        raise TransportRefused(local.fabric_problem)
    nics = local.fabric.nics
    ways = paths(nics, card.nics, RAILS_LIMIT)
    if not ways:
        raise TransportRefused(
            f"no device of one side can be connected with one of the other: here"
            f" {', '.join(f'{one.name} ({one.family})' for one in nics)}, there"
            f" {', '.join(f'{one.name} ({one.family})' for one in card.nics) or 'none'}"
        )
    number = secrets.randbits(62)
    hello = structs.replace(_hello(local, card, number), is_direct=True)
    first = _dial_tcp(local, card, hello, deadline_s, timeout_s)
    link = local.plane.link(False, False, 0, True)
    _add_rails(link, first, lambda: first, 1)

    def greet_rail(offer: RailOffer) -> Welcome:
        until_s = time.monotonic() + BUILD_TIMEOUT_S
        said = structs.replace(hello, rail=offer)
        dialled = _dial_tcp(local, card, said, until_s, BUILD_TIMEOUT_S)
        dialled.sock.close()
        return dialled.welcome

    direct = DirectLink(link, card, greet_rail)
    with contextlib.ExitStack() as undo:
        undo.callback(link.die, Reason.PEER_CLOSED)  # The keeper would keep it for ever.
        local.keeper.add(local, direct, ways)
        problem = direct.await_rails(deadline_s)
        if problem is None:
            undo.pop_all()
    if problem is not None:
        raise TransportRefused(f"no rail to {where} works: {problem}{_lacking(nics, card)}")
    return Opened(link, "rdma", "", direct)


def _lacking(nics: tuple[Nic, ...], card: Card) -> str:
    """Which devices have no address that a network would carry, and the fix."""
    sides = [(one.name, one.netdev, one.gids) for one in nics]
    sides += [(f"{one.name} there", "its interface", tuple(one.gids)) for one in card.nics]
    return "".join(
        f"; {name} has a link-local address alone: give {netdev or 'its interface'} one of the"
        " network (ip address add …)"
        for name, netdev, gids in sides
        if gids and all(gid.kind is GidKind.LINK_LOCAL for gid in gids)
    )


def _dial_tcp(
    local: Local, card: Card, hello: Hello, deadline_s: float, timeout_s: float
) -> Dialled:
    where, config = address_text(card.host, card.port), local.config
    source = None if config.source_host is None else (config.source_host, 0)
    try:
        socket.getaddrinfo(card.host, card.port, flags=socket.AI_NUMERICHOST)
    except OSError:
        # Looking a name up knows no deadline, and connecting to each of its addresses several.
        raise ConnectError(
            f"the card of the engine {card.id} has the host {card.host!r}, which is no numeric"
            " address; engines put nothing else on their cards"
        ) from None

    def dial() -> Dialled:
        with contextlib.ExitStack() as undo:
            left_s = max(deadline_s - time.monotonic(), 0.001)
            sock = socket.create_connection((card.host, card.port), left_s, source)
            undo.callback(sock.close)
            tune(sock, config.stall_timeout_s)
            if config.socket_buffer_bytes:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.socket_buffer_bytes)
            dialled = greet(sock, hello, card, where, deadline_s)
            undo.pop_all()
            return dialled

    with blame(card, where, timeout_s):
        return insist(dial, deadline_s)


_OPENERS: dict[str, Callable[[Local, Card, float, float], Opened]] = {
    "tcp": _open_tcp,
    "samehost": _open_samehost,
    "rdma": _open_rdma,
}


def _add_rails(link: LinkHandle, first: Dialled, dial: Callable[[], Dialled], rails: int) -> None:
    """Adds the first rail, and as many more as both sides want."""
    dialled = [first]
    try:
        while len(dialled) < min(rails, first.welcome.rails):
            dialled.append(dial())
        while dialled:
            if link.add_rail(dialled[0].sock.fileno(), dialled[0].rings_fd):
                dialled.pop(0).sock.detach()
            else:
                dialled.pop(0).close()  # The link has died already, and has the reason.
    finally:
        for one in dialled:
            one.close()


def _about_memory(local: Local, card: Card, number: int) -> Say:
    """Tells the engine about memory that was allocated here, for the link with that number."""
    where = f"the abstract socket of {card.id}"

    def say(memory: SharedMemory, turn: int, is_mapped: bool, deadline_s: float) -> str | None:
        timeout_s = max(deadline_s - time.monotonic(), 0.001)
        shared = Shared(memory.address, memory.nbytes, memory.serial, turn)
        hello = structs.replace(_hello(local, card, number), shared=shared)
        fds = [memory.fd] if is_mapped else []
        try:
            with blame(card, where, timeout_s), samehost.dial(card, timeout_s) as sock:
                greet(sock, hello, card, where, deadline_s, fds)
        except Error as exc:
            return str(exc)
        return None

    return say
