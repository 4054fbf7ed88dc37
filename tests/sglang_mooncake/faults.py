# SPDX-License-Identifier: Apache-2.0
"""Faults inside a hand-over, for tests: something between two ranks that changes what arrives, and
counts as if nothing were wrong. They are planted around the engine's calls and in the memory of
either side; nothing of them is in the product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from handover import Handover, until

import te
from te.peers import Peer

__all__ = ["FAULTS", "Fault", "delays_a_block", "faulty", "landed_then"]


@dataclass
class Planted:
    """What a fault does to one write of a hand-over.

    blocks: instead of those that were asked for.
    before: is called before the prefill rank makes its digests, and `landed` before the decode
        rank does, once everything counts as landed; `compared` once it has.
    """

    blocks: te.Blocks
    before: Callable[[], None] = lambda: None
    landed: Callable[[], None] = lambda: None
    compared: Callable[[], None] = lambda: None


@dataclass
class Spot:
    """A hand-over of which a block is chosen: the first of a page."""

    pair: Handover
    blocks: te.Blocks
    engine: te.Engine
    keep: list[np.ndarray] = field(default_factory=list)

    def memory(self, address: int, nbytes: int) -> np.ndarray:
        """Of either side, as both live in this process."""
        for side in (self.pair.source, self.pair.target):
            for start, size in side.ranges():
                if start <= address and address + nbytes <= start + size:
                    whole = side.kv if side.kv.ctypes.data == start else side.aux
                    flat = whole.reshape(-1).view(np.uint8)
                    return flat[address - start : address - start + nbytes]
        raise AssertionError(f"nobody has {address:#x}")


Fault = Callable[[Spot], Planted]


def flips_a_bit_on_the_way(spot: Spot) -> Planted:
    rows = spot.blocks.array.copy()
    block = rows[0]
    wrong = spot.memory(int(block["src"]), int(block["nbytes"])).copy()
    wrong[len(wrong) // 2] ^= 0x10
    spot.keep.append(wrong)
    spot.engine.register(wrong, remote="none")
    rows[0]["src"] = wrong.ctypes.data
    return Planted(te.Blocks(rows))


def flips_a_bit_where_it_lands(spot: Spot) -> Planted:
    block = spot.blocks.array[0]

    def flip() -> None:
        spot.memory(int(block["dst"]), int(block["nbytes"]))[7] ^= 1

    return Planted(spot.blocks, landed=flip)


def drops_a_block(spot: Spot) -> Planted:
    """As many blocks and bytes count: another one comes twice."""
    rows = spot.blocks.array.copy()
    alike = np.flatnonzero(rows["nbytes"] == rows[0]["nbytes"])
    rows[0] = rows[alike[1]]
    return Planted(te.Blocks(rows))


def writes_a_block_a_page_further(spot: Spot) -> Planted:
    rows = spot.blocks.array.copy()
    rows[0]["dst"] += spot.pair.target.kv.shape[-1]
    return Planted(te.Blocks(rows))


def delays_a_block(spot: Spot) -> Planted:
    """It lands once everything counts, completion record and all, and has been compared."""
    block, nbytes = spot.blocks.array[0], int(spot.blocks.array[0]["nbytes"])
    sent = spot.memory(int(block["src"]), nbytes).copy()

    def land() -> None:
        spot.memory(int(block["dst"]), nbytes)[:] = sent

    return Planted(drops_a_block(spot).blocks, compared=land)


def uses_a_page_again_at_the_source(spot: Spot) -> Planted:
    """Before the prefill side is done with it."""
    block = spot.blocks.array[0]

    def use() -> None:
        spot.memory(int(block["src"]), int(block["nbytes"]))[:] = 0x55

    return Planted(spot.blocks, before=use)


def uses_a_page_again_at_the_destination(spot: Spot) -> Planted:
    block = spot.blocks.array[0]

    def use() -> None:
        spot.memory(int(block["dst"]), int(block["nbytes"]))[:] = 0x55

    return Planted(spot.blocks, landed=use)


FAULTS: tuple[Fault, ...] = (
    flips_a_bit_on_the_way,
    flips_a_bit_where_it_lands,
    drops_a_block,
    writes_a_block_a_page_further,
    delays_a_block,
    uses_a_page_again_at_the_source,
    uses_a_page_again_at_the_destination,
)


@contextmanager
def faulty(pair: Handover, fault: Fault, nth: int = 0) -> Iterator[list[Planted]]:
    """The fault is in the nth write of the prefill rank; yields those that happened."""
    planted: list[Planted] = []
    write, writes = Peer.write, list[te.Blocks]()
    sent, landed = pair.prefill.side._digests, pair.decode.side._digests
    message, post = sent._message, landed.post

    def wrong(peer: Peer, blocks: te.Blocks, tag: int = 0) -> te.Transfer:
        writes.append(blocks)
        if len(writes) != nth + 1:
            return write(peer, blocks, tag)
        one = fault(Spot(pair, blocks, pair.prefill.engine, kept))
        planted.append(one)
        return write(peer, one.blocks, tag)

    def used(asked):  # type: ignore[no-untyped-def]
        # The engine has read the pages: what it reads later would be digested like that, too.
        engine, tag = pair.decode.side._engine, tag_of(pair)
        until(lambda: engine.arrived(tag) == len(writes), "all has arrived")
        for one in planted:
            one.before()
        return message(asked)

    def spoil(_: object) -> None:
        for one in planted:
            one.landed()

    def compared(outcome: Any) -> None:
        for one in planted:
            one.compared()
        post(outcome)

    kept: list[np.ndarray] = []
    with (
        mock.patch.object(Peer, "write", wrong),
        mock.patch.object(sent, "_message", used),
        mock.patch.object(landed, "landed", landed_then(pair, spoil)),
        mock.patch.object(landed, "post", compared),
    ):
        yield planted


def landed_then(pair: Handover, change: Callable[[Any], None]) -> Callable[[Any], Any]:
    """In place of the decode side's `landed`: `change` is called with each `Compare` of which all
    has landed, before it is digested."""
    landed = pair.decode.side._digests.landed

    def changed(compare: Any) -> Any:
        completion = landed(compare)
        if completion is not None:
            change(compare)
        return completion

    return changed


def tag_of(pair: Handover) -> int:
    """Of the room that is under way."""
    (room,) = pair.decode.side._rooms.rooms
    (expected,) = room.view.expected
    return expected.tag
