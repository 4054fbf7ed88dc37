# SPDX-License-Identifier: Apache-2.0
"""What peers may do over RDMA, on devices that move nothing: which keys they are told, and what a
source refuses by itself because of what it was told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from te_direct import NullEngine, RawDirectSource, ask, raw_direct_destination, table, word
from te_far import wait_until
from te_frames import ALL_RIGHTS, FAR, MAY_READ, MAY_WRITE_TAGGED, PIECE, AckStatus, Kind, ack

import te
from te.memory import RIGHTS
from te_bench._null import Wires

TIMEOUT_S = 60.0
#: Of all engines: a thread may stand still for seconds.
PATIENT: dict[str, Any] = {
    "connect_timeout_s": TIMEOUT_S,
    "stall_timeout_s": TIMEOUT_S,
    "rail_timeout_s": TIMEOUT_S,
}
TAG = 5
PAGE = 4096
WRITTEN = {"tagged", "read-tagged", "read-write"}


class Target:
    """An engine with one region of each right, in the order of their addresses."""

    def __init__(self, engine: te.Engine) -> None:
        self.memory = np.zeros(len(RIGHTS) * PAGE, np.uint8)
        self.start = int(self.memory.ctypes.data)
        for i, remote in enumerate(RIGHTS):
            engine.register(self.start + i * PAGE, PAGE, remote=remote)
        self.told = [one for one in RIGHTS if one != "none"]

    def at(self, remote: str) -> int:
        return self.start + list(RIGHTS).index(remote) * PAGE  # type: ignore[arg-type]


def keys_of(raw: RawDirectSource, frame: bytes) -> dict[int, tuple[int, bool]]:
    """What the engine tells before it grants that: by address, the rights and whether there is a
    key."""
    raw.send(frame)
    items = np.frombuffer(raw.await_frame(Kind.TABLE).body, FAR)
    raw.granted()
    return {int(one["start"]): (int(one["rights"]), bool(one["keys"][0])) for one in items}


def test_a_source_is_told_keys_of_what_it_has_asked_for_and_was_granted() -> None:
    wires = Wires()
    with NullEngine(wires, nics=1, **PATIENT) as engine:
        target = Target(engine)
        engine.expect(TAG)

        def told(*keyed: str) -> dict[int, tuple[int, bool]]:
            return {target.at(one): (RIGHTS[one], one in keyed) for one in target.told}  # type: ignore[index]

        raw = RawDirectSource(engine.card(), wires)
        assert keys_of(raw, ask(1, 0)) == told("read", "read-tagged", "read-write")
        raw.send(ask(2, 1, tag=9))
        assert raw.await_frame(Kind.ACK).status == AckStatus.REFUSED
        raw.send(ask(3, 0))
        assert raw.frame().kind is Kind.ACK, "nothing has changed, whatever it asked for in vain"
        assert keys_of(raw, ask(4, 1, tag=TAG)) == told(
            "read", "tagged", "read-tagged", "read-write"
        )
        raw.send(ask(5, 1), ask(6, 0), ask(7, 1, tag=TAG))
        raw.await_frame(Kind.TABLE)  # It had not asked for writes without a tag before.
        assert [raw.frame().kind for _ in range(3)] == [Kind.ACK] * 3
        raw.close()
        raw = RawDirectSource(engine.card(), wires)
        assert keys_of(raw, ask(1, 1)) == told("read-write")
        raw.close()


def test_a_tag_for_another_engine_is_not_granted() -> None:
    wires = Wires()
    with (
        NullEngine(wires, nics=1, **PATIENT) as engine,
        NullEngine(wires, nics=1, **PATIENT) as source,
    ):
        target, near = Target(engine), np.zeros(PAGE, np.uint8)
        source.register(near, remote="none")
        peer = source.connect(engine.card())
        blocks = te.Blocks.of(near.ctypes.data, target.at("tagged"), PAGE)
        engine.expect(TAG, peer=engine)
        with pytest.raises(te.TransferFailed, match="the tag 0x5 is not open here"):
            peer.write(blocks, TAG).wait(TIMEOUT_S)
        engine.fence(TAG, TIMEOUT_S)
        engine.expect(TAG, peer=source)
        assert peer.write(blocks, TAG).wait(TIMEOUT_S)


@pytest.mark.parametrize("remote", list(RIGHTS))
def test_a_source_gives_up_what_it_may_not_do(remote: str) -> None:
    wires = Wires()
    with (
        NullEngine(wires, nics=1, **PATIENT) as engine,
        NullEngine(wires, nics=1, **PATIENT) as source,
    ):
        target, near = Target(engine), np.zeros(PAGE, np.uint8)
        source.register(near, remote="none")
        engine.expect(TAG)
        peer = source.connect(engine.card())
        here, there = near.ctypes.data, target.at(remote)
        outside = "lie outside .* the nearest of 4 regions for peers is"
        for tag, allowed in ((TAG, WRITTEN), (0, {"read-write"})):
            write = peer.write(te.Blocks.of(here, there, PAGE), tag)
            if remote in allowed:
                assert write.wait(TIMEOUT_S)
                continue
            says = outside if remote == "none" else "peers may not write"
            with pytest.raises(te.TransferFailed, match=f"the destination: {PAGE} bytes .* {says}"):
                write.wait(TIMEOUT_S)
        read = peer.read(te.Blocks.of(there, here, PAGE))
        if remote.startswith("read"):
            assert read.wait(TIMEOUT_S)
        else:
            says = outside if remote == "none" else "peers may not read"
            with pytest.raises(te.TransferFailed, match=f"the source: {PAGE} bytes .* {says}"):
                read.wait(TIMEOUT_S)
        assert peer.stats().rails[0].reason == "", "no queue pair was lost for it"


def test_of_ranges_that_touch_each_must_allow_it() -> None:
    wires = Wires()
    with (
        NullEngine(wires, nics=1, **PATIENT) as source,
        raw_direct_destination(wires, source) as (peer, raw),
    ):
        near = np.zeros(3 * PAGE, np.uint8)
        source.register(near, remote="none")
        first = table([(PAGE, 2 * PAGE)], rights=MAY_WRITE_TAGGED)
        rest = table([(2 * PAGE, 3 * PAGE)], first=False, rights=ALL_RIGHTS)
        write = peer.write(te.Blocks.of(near.ctypes.data, 2 * PAGE - 1, 2))
        number = raw.await_frame(Kind.ASK).transfer
        raw.send(first, rest, ack(number, AckStatus.GRANTED))
        raw.await_frame(Kind.ABANDON)
        raw.send(ack(number, AckStatus.ABANDONED))
        with pytest.raises(te.TransferFailed, match="2 bytes at 0x1fff are memory"):
            write.wait(TIMEOUT_S)


def test_a_right_that_is_gone_while_pieces_wait_ends_their_transfer() -> None:
    """A region was taken away, and another one with other rights is in its place: what is posted by
    then lands in the former, or fails at its key."""
    wires, nbytes = Wires(), 32 << 20
    with (
        NullEngine(wires, nics=1, **PATIENT) as source,
        raw_direct_destination(wires, source) as (peer, raw),
    ):
        near = np.zeros(nbytes, np.uint8)
        source.register(near, remote="none")
        wires.hold(True)  # No more than 8 MiB are posted.
        write = peer.write(te.Blocks.of(near.ctypes.data, 1 << 30, nbytes))
        number = raw.await_frame(Kind.ASK).transfer
        there = [(1 << 30, (1 << 30) + nbytes)]
        raw.send(table(there), ack(number, AckStatus.GRANTED))
        raw.send(table(there, rights=MAY_READ))
        # The table came before this one's grant, which has come when it is refused.
        other = peer.write(te.Blocks.of(near.ctypes.data, 1 << 30, 1))
        second = raw.await_frame(Kind.ASK).transfer
        raw.send(ack(second, AckStatus.GRANTED))
        assert raw.await_frame(Kind.ABANDON).transfer == second
        raw.send(ack(second, AckStatus.ABANDONED))
        with pytest.raises(te.TransferFailed, match="may not write without a tag"):
            other.wait(TIMEOUT_S)
        wires.hold(False)
        given_up = raw.await_frame(Kind.ABANDON)
        assert given_up.transfer == number
        assert given_up.total < len(peer.stats().rails) * 32
        raw.send(ack(number, AckStatus.ABANDONED))
        with pytest.raises(te.TransferFailed, match=r"the destination: .* may not write without"):
            write.wait(TIMEOUT_S)


def test_a_piece_that_was_given_up_and_lost_with_its_rail_counts_once() -> None:
    """Its memory is gone before all of it is posted, and then its queue pair fails: it waits for a
    rail again, and is not told to have been written."""
    wires, blocks = Wires(), 1000
    with (
        NullEngine(wires, nics=1, **PATIENT) as source,
        raw_direct_destination(wires, source) as (peer, raw),
    ):
        near, far = np.zeros(2 * blocks * PAGE, np.uint8), 1 << 30
        source.register(near, remote="none")
        wait_until(lambda: peer.rails == 1, "a rail")
        wires.expect(0)
        wires.hold(True)  # The queue is full before all of it is posted.
        every_second = np.arange(blocks, dtype=np.uint64) * np.uint64(2 * PAGE)
        write = peer.write(te.Blocks.of(near.ctypes.data + every_second, far + every_second, PAGE))
        asked = raw.await_frame(Kind.ASK)
        there = [(far, far + near.nbytes)]
        raw.send(table(there), ack(asked.transfer, AckStatus.GRANTED))
        wait_until(lambda: wires.posted()[0] > 500, "the queue is full")
        raw.send(table(there, rights=MAY_READ))
        other = peer.write(te.Blocks.of(near.ctypes.data, far, 1))
        second = raw.await_frame(Kind.ASK).transfer
        raw.send(ack(second, AckStatus.GRANTED))
        assert raw.await_frame(Kind.ABANDON).transfer == second, "the table has come"
        raw.send(ack(second, AckStatus.ABANDONED))
        ((rail, epoch), pair) = next(iter(raw.rails.items()))
        pair.to_error()  # What is posted from now on fails.
        wires.hold(False)
        lost = raw.await_frame(Kind.RAIL_LOST)
        assert (lost.transfer, lost.tag) == (rail, epoch)
        landed = sum(status == 0 for status, _ in pair.poll()) - 1  # the rail's probe
        carried = np.frombuffer(lost.body, PIECE).tolist()
        raw.send(word(Kind.RAIL_CLOSED, rail, epoch, [one for one in carried if one[1] < landed]))
        given_up = raw.await_frame(Kind.ABANDON)
        assert (given_up.transfer, given_up.total) == (asked.transfer, landed)
        raw.send(ack(asked.transfer, AckStatus.ABANDONED))
        for one in (write, other):
            with pytest.raises(te.TransferFailed, match="may not write without"):
                one.wait(TIMEOUT_S)
