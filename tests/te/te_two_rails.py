# SPDX-License-Identifier: Apache-2.0
"""A destination by hand with two connections, so that tests say what comes by which."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor

from te_frames import BLOCK, HEADER, LANDING, REPLY, Kind, segment, trailer
from te_raw import TIMEOUT_S, raw_destination, read_exactly, take_hello, welcome

import te

__all__ = ["TwoRails"]


class TwoRails:
    """A link to a destination by hand, with two connections: the first is its owner's."""

    def __init__(self, engine: te.Engine) -> None:
        with raw_destination() as (listener, card), ThreadPoolExecutor(1) as pool:
            dialled = pool.submit(engine.connect, card, TIMEOUT_S)
            self.rails = []
            for _ in range(2):
                sock = listener.accept()[0]
                sock.settimeout(TIMEOUT_S)
                sock.sendall(welcome(take_hello(sock), rails=2))
                self.rails.append(sock)
            self.peer: te.Peer = dialled.result(TIMEOUT_S)

    def frame(self, *rails: socket.socket) -> tuple[Kind, int, int, socket.socket]:
        """The next one, of these connections alone if there are any: its kind, its status, the
        number of its transfer, and where it came."""
        ready, _, _ = select.select(rails or self.rails, [], [], TIMEOUT_S)
        data = read_exactly(ready[0], HEADER.size)
        assert data is not None
        kind, status, _, count, transfer, _, nbytes, _ = HEADER.unpack(data)
        behind = count if kind == Kind.ACK else BLOCK.itemsize * count
        if kind == Kind.SEGMENT:
            behind = LANDING.itemsize * count + nbytes + len(trailer())
        assert read_exactly(ready[0], behind) is not None
        return Kind(kind), status, transfer, ready[0]

    def take(self, kind: Kind, *rails: socket.socket) -> tuple[int, socket.socket]:
        """The number of the transfer whose frame is the next; and where it came."""
        found, _, transfer, rail = self.frame(*rails)
        assert found == kind
        return transfer, rail

    def reply(self, rail: int, transfer: int, address: int, data: bytes) -> None:
        """To a read, by one of the connections."""
        head = segment(transfer, transfer, [(address, len(data))], len(data), flags=REPLY)
        self.rails[rail].sendall(head + data + trailer())

    def close(self) -> None:
        for sock in self.rails:
            sock.close()
