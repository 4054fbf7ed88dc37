# SPDX-License-Identifier: Apache-2.0
"""Arrival is proven: what landed beside what was asked for, first as figures, then on engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handover import LAYERS, WAIT_S, handover, until

import te
from sglang_mooncake.layout import SEAL_BYTES, Seal, seal_bytes
from sglang_mooncake.rooms.arrival import Awaited, SealDisagrees, has_arrived
from sglang_mooncake.rooms.states import RoomState

AWAITED = Awaited(
    tag=7, slot=0, generation=100, pages=range(4, 5), layers=6, states=range(1, 3), aux=1
)
SEAL = Seal(generation=100, writes=3, pages=4, page_layers=24, states=1, aux=1, nbytes=4_096)


def test_a_seal_that_says_what_was_asked_for_and_what_landed_is_an_arrival():
    assert has_arrived(AWAITED, SEAL, 3, 4_096)
    assert has_arrived(AWAITED, replace(SEAL, states=2), 3, 4_096)


@pytest.mark.parametrize("nbytes", range(SEAL_BYTES))
def test_a_seal_of_which_a_part_is_still_to_land_is_waited_for(nbytes):
    """Whatever the engine has counted by then: never more than the transfers before the seal's."""
    landed = Seal.unpack(seal_bytes(SEAL)[:nbytes].ljust(SEAL_BYTES, b"\0"))
    if landed == SEAL:
        return  # the bytes that are missing are zeros
    for writes in range(SEAL.writes):
        assert not has_arrived(AWAITED, landed, writes, 1_000 * writes)


@pytest.mark.parametrize(
    ("seal", "writes", "nbytes"),
    [(SEAL, 2, 4_096), (replace(SEAL, generation=99), 3, 4_096), (SEAL, 0, 0)],
    ids=["a transfer is on its way", "of the slot's former room", "nothing"],
)
def test_what_is_not_all_there_is_waited_for(seal, writes, nbytes):
    assert not has_arrived(AWAITED, seal, writes, nbytes)


@pytest.mark.parametrize(
    ("seal", "writes", "nbytes", "says"),
    [
        (replace(SEAL, pages=2, page_layers=12), 3, 4_096, "pages: 4 asked for, 2 sent"),
        (replace(SEAL, page_layers=23), 3, 4_096, "layers of pages: 24 asked for, 23 sent"),
        (replace(SEAL, states=0), 3, 4_096, "state lists: 1 to 2 asked for, 0 sent"),
        (replace(SEAL, states=3), 3, 4_096, "state lists: 1 to 2 asked for, 3 sent"),
        (replace(SEAL, aux=0), 3, 4_096, "metadata: 1 asked for, 0 sent"),
        (SEAL, 3, 4_000, "bytes: 4096 sent, 4000 landed"),
        (SEAL, 4, 5_000, "transfers: 3 sent, 4 landed; bytes: 4096 sent, 5000 landed"),
    ],
)
def test_a_whole_seal_that_disagrees_is_told_with_both_figures(seal, writes, nbytes, says):
    with pytest.raises(SealDisagrees) as caught:
        has_arrived(AWAITED, seal, writes, nbytes)
    assert f": {says}. Do both" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"pages": 2}, "pages: 3 asked for, 2 sent"),
        ({"nbytes": 999}, f"bytes: 999 sent, {SEAL_BYTES} landed"),
        ({"aux": 0}, "metadata: 1 asked for, 0 sent"),
    ],
)
def test_a_source_that_ends_with_less_than_was_asked_for_fails_the_room_at_once(change, says):
    """The source's engine writes a seal and nothing else."""
    with handover() as pair:
        source = pair.prefill.engine  # Which alone may write under the room's tag.
        pair.decode.know(pair.address)
        _, use = pair.open_both(1)
        pair.name_pages(use, [4, 5, 6], aux=0)
        until(lambda: use.view.state is RoomState.REQUESTED, "the pages are published")
        (awaited,) = use.view.awaited
        sent = Seal(
            use.view.generation,
            writes=1,
            pages=3,
            page_layers=3 * LAYERS,
            states=0,
            aux=1,
            nbytes=SEAL_BYTES,
        )
        memory = np.frombuffer(bytearray(seal_bytes(replace(sent, **change))), np.uint8)
        near = source.register(memory)
        slot = pair.decode.seals.buffers.addresses[0] + awaited.slot * SEAL_BYTES
        peer = source.connect(pair.decode.engine.card())
        transfer = peer.write(te.Blocks.of(near.address, slot, SEAL_BYTES), tag=awaited.tag)
        assert transfer.wait(WAIT_S) is te.Status.DONE
        assert pair.decode.side.has_arrived(use) == (says is None)
        if says is not None:
            until(lambda: use.view.over, "the room has failed")
            assert use.view.state is RoomState.FAILED
            assert says in (use.view.reason or "")


def test_no_other_engine_writes_under_the_tag_of_a_room():
    """Not even one that has been told it."""
    with handover() as pair, te.Engine(te.Config()) as stranger:
        pair.decode.know(pair.address)
        _, use = pair.open_both(1)
        pair.name_pages(use, [4], aux=0)
        until(lambda: use.view.state is RoomState.REQUESTED, "the pages are published")
        (awaited,) = use.view.awaited
        memory = np.full(SEAL_BYTES, 7, np.uint8)
        stranger.register(memory, remote="none")
        peer = stranger.connect(pair.decode.engine.card())
        slot = pair.decode.seals.buffers.addresses[0] + awaited.slot * SEAL_BYTES
        blocks = te.Blocks.of(memory.ctypes.data, slot, SEAL_BYTES)
        with pytest.raises(te.TransferFailed, match=f"the tag {awaited.tag:#x} is not open here"):
            peer.write(blocks, tag=awaited.tag).wait(WAIT_S)
        with pytest.raises(te.TransferFailed, match="peers may not write without a tag"):
            peer.write(blocks).wait(WAIT_S)
        assert pair.decode.engine.arrived(awaited.tag) == 0
