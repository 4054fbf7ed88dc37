# SPDX-License-Identifier: Apache-2.0
"""The routing ids by which a ROUTER tells its peers apart: its own, whatever its peers claim."""

from __future__ import annotations

import zmq

__all__ = ["ignore_claimed_ids"]


def ignore_claimed_ids(router: zmq.Socket[bytes]) -> None:
    """Has a ROUTER that has just been bound number its peers, and read none of their claims.

    A peer may claim an id: the Identity of its READY command (ZMTP, RFC 23). libzmq up to 4.3.5
    ends the process when it then gives the same id to another peer, which claims none, and no
    option refuses claims. A ROUTER in raw mode does not look at them.

    Raw mode is for peers that do not speak ZMTP. What they speak, and whether CURVE protects it, is
    settled for an endpoint when it is bound; by which id they are known, when they come in. So raw
    mode is switched on between the two, and changes the ids alone. It leaves one frame for each
    message to a peer, behind the id; an empty one would end the connection.
    """
    router.setsockopt(zmq.ROUTER_RAW, 1)
