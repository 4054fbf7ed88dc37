# SPDX-License-Identifier: Apache-2.0
"""Peers that ask to read and take no answer: what they are owed is bounded, others are served."""

from __future__ import annotations

from typing import Final

import numpy as np
from te_far import wait_until
from te_frames import BLOCK, HEADER, Kind, descriptors, header
from te_raw import TIMEOUT_S, RawSource, read_exactly
from te_ring import HEAD, OUT, RING_BYTES, TAIL, RingEnd

import te

BLOCKS_MAX: Final = 1020
#: What a link, and an engine, may owe (te/core/link.pxd), in blocks.
OWED_MAX: Final = 1 << 15
OWED_ALL_MAX: Final = 1 << 19


def reads(address: int, count: int) -> bytes:
    """So many READs, each of the same byte as often as a frame can."""
    blocks = descriptors(Kind.READ, 1, [(address, 1 + i, 1) for i in range(BLOCKS_MAX)])[
        HEADER.size :
    ]
    return b"".join(
        header(Kind.READ, count=BLOCKS_MAX, transfer=i, nbytes=BLOCKS_MAX, total=BLOCKS_MAX)
        + blocks
        for i in range(1, 1 + count)
    )


class Asker:
    """Asks over rings for more than an engine sends at once."""

    def __init__(self, card: bytes, data: bytes, count: int) -> None:
        source = RawSource(card, "samehost")
        assert isinstance(source.sock, RingEnd)
        self.sock = source.sock
        self._unsent = memoryview(data)
        self._count = count

    def push(self) -> None:
        """Sends what there is room for; to be called again."""
        room = RING_BYTES - (self.sock.get(OUT + HEAD) - self.sock.get(OUT + TAIL))
        part, self._unsent = self._unsent[:room], self._unsent[room:]
        self.sock.sendall(bytes(part))

    def take(self) -> None:
        """Takes what it has asked for and confirms nothing. Not one read is refused."""
        for _ in range(self._count):
            self.push()
            data = read_exactly(self.sock, HEADER.size)
            assert data is not None, "the link has ended"
            kind, _, _, count, _, _, _, _ = HEADER.unpack(data)
            assert kind == Kind.PULL
            assert read_exactly(self.sock, count * BLOCK.itemsize) is not None


def owed(engine: te.Engine, askers: list[Asker]) -> int:
    for asker in askers:
        asker.push()
    return engine._plane.reply_blocks


def test_a_peer_that_takes_no_answers_is_read_from_no_more() -> None:
    with te.Engine(te.Config(stall_timeout_s=TIMEOUT_S)) as engine, te.Engine() as friend:
        region = engine.register(bytearray(1), remote="read")
        here = np.zeros(1, np.uint8)
        friend.register(here)
        peer = friend.connect(engine.card())
        asker = Asker(engine.card(), reads(region.address, 250), 250)
        wait_until(lambda: owed(engine, [asker]) >= OWED_MAX, "it owes as much as it may")
        for _ in range(100):
            read = peer.read(te.Blocks.of(region.address, here.ctypes.data, 1))
            assert read.wait(TIMEOUT_S) is te.Status.DONE
            # The bound is looked at before a frame is; and one block is the friend's.
            assert owed(engine, [asker]) <= OWED_MAX + BLOCKS_MAX + 1
        asker.take()
        wait_until(lambda: owed(engine, []) == 0, "what was taken is owed no more")
        asker.sock.close()


def test_what_all_peers_do_not_take_is_bounded() -> None:
    count = OWED_ALL_MAX // OWED_MAX + 4
    with te.Engine(te.Config(stall_timeout_s=TIMEOUT_S)) as engine, te.Engine() as friend:
        region = engine.register(bytearray(1), remote="read")
        here = np.zeros(4 * BLOCKS_MAX, np.uint8)
        friend.register(here)
        peer = friend.connect(engine.card())
        data = reads(region.address, 60)
        askers = [Asker(engine.card(), data, 60) for _ in range(count)]
        wait_until(lambda: owed(engine, askers) >= OWED_ALL_MAX, "it owes as much as it may")
        # One that takes what it asks for is served, a frame at a time.
        blocks = te.Blocks.of(
            [region.address] * len(here), here.ctypes.data + np.arange(len(here)), 1
        )
        assert peer.read(blocks).wait(TIMEOUT_S) is te.Status.DONE
        for _ in range(100):
            assert owed(engine, askers) <= OWED_ALL_MAX + count * BLOCKS_MAX
        for asker in askers:
            asker.sock.close()
        wait_until(lambda: owed(engine, []) == 0, "what was lost with a link is owed no more")
