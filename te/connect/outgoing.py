# SPDX-License-Identifier: Apache-2.0
"""Opening a link: by the first transport that works."""

from __future__ import annotations

import time
from dataclasses import dataclass

from te.connect.dial import address_text
from te.connect.transports import EngineTransports
from te.errors import ConnectError, TransportMismatch
from te.handshake import Card
from te.transports.base import OutgoingLink, TransportRefused

__all__ = ["OpenLink", "open_link"]


@dataclass(frozen=True)
class OpenLink:
    """A link with all its rails."""

    link: OutgoingLink
    #: Name of its transport.
    transport: str
    #: Why no preferred transport was taken; empty when the first choice works.
    reason: str


def open_link(transports: EngineTransports, card: Card, timeout_s: float) -> OpenLink:
    """Blocks for at most ``timeout_s``; ``te.ConnectError``, ``te.VersionError``,
    ``te.HandshakeError``. ``te.TransportMismatch`` if it would fail again in the same way."""
    deadline_s = time.monotonic() + timeout_s
    names = [one.name for one in transports]
    if not card.offers.keys() & set(names):
        raise TransportMismatch(
            f"no common transport: the engine {card.id} offers {', '.join(card.offers)},"
            f" this one {', '.join(names)}"
        )
    transports.commit()
    reasons: list[str] = []
    is_for_good = True
    for one in transports:
        if one.name not in card.offers:
            reasons.append(f"{one.name}: the other engine does not offer it")
            continue
        problem = transports.problem(one)
        if problem is not None:
            reasons.append(f"{one.name}: {problem}")
            continue
        try:
            link = one.open(card, card.offers[one.name], deadline_s, timeout_s)
        except TransportRefused as exc:
            reasons.append(f"{one.name}: {exc}")
            is_for_good &= exc.for_good
            continue
        return OpenLink(link, one.name, "; ".join(reasons))
    kind_of_error = TransportMismatch if is_for_good else ConnectError
    raise kind_of_error(
        f"no transport to the engine {card.id} at {address_text(card.host, card.port)}:"
        f" {'; '.join(reasons)}"
    )
