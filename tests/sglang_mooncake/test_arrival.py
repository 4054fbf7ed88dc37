# SPDX-License-Identifier: Apache-2.0
"""Arrival is proven: what landed beside what was asked for, first as figures, then on engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handover import LAYERS, WAIT_S, handover, until

import te
from sglang_mooncake.layout import (
    COMPLETION_BYTES,
    CompletionRecord,
    Verify,
    completion_bytes,
)
from sglang_mooncake.rooms.arrival import CompletionDisagrees, Expected, has_arrived
from sglang_mooncake.rooms.states import RoomState

EXPECTED = Expected(
    tag=7, slot=0, generation=100, pages=range(4, 5), layers=6, states=range(1, 3), aux=1, digests=1
)
COMPLETION = CompletionRecord(
    generation=100, writes=3, pages=4, page_layers=24, states=1, aux=1, digests=1, nbytes=4_096
)


def test_a_completion_record_that_says_what_was_asked_for_and_what_landed_is_an_arrival():
    assert has_arrived(EXPECTED, COMPLETION, 3, 4_096)
    assert has_arrived(EXPECTED, replace(COMPLETION, states=2), 3, 4_096)


@pytest.mark.parametrize("nbytes", range(COMPLETION_BYTES))
def test_a_completion_record_of_which_a_part_is_still_to_land_is_waited_for(nbytes):
    """Whatever the engine has counted by then: never more than the transfers before the one with
    the completion record."""
    landed = CompletionRecord.unpack(
        completion_bytes(COMPLETION)[:nbytes].ljust(COMPLETION_BYTES, b"\0")
    )
    if landed == COMPLETION:
        return  # the bytes that are missing are zeros
    for writes in range(COMPLETION.writes):
        assert not has_arrived(EXPECTED, landed, writes, 1_000 * writes)


@pytest.mark.parametrize(
    ("completion", "writes", "nbytes"),
    [(COMPLETION, 2, 4_096), (replace(COMPLETION, generation=99), 3, 4_096), (COMPLETION, 0, 0)],
    ids=["a transfer is on its way", "of the slot's former room", "nothing"],
)
def test_what_is_not_all_there_is_waited_for(completion, writes, nbytes):
    assert not has_arrived(EXPECTED, completion, writes, nbytes)


@pytest.mark.parametrize(
    ("completion", "writes", "nbytes", "says"),
    [
        (replace(COMPLETION, pages=2, page_layers=12), 3, 4_096, "pages: 4 asked for, 2 sent"),
        (replace(COMPLETION, page_layers=23), 3, 4_096, "layers of pages: 24 asked for, 23 sent"),
        (replace(COMPLETION, states=0), 3, 4_096, "state lists: 1 to 2 asked for, 0 sent"),
        (replace(COMPLETION, states=3), 3, 4_096, "state lists: 1 to 2 asked for, 3 sent"),
        (replace(COMPLETION, aux=0), 3, 4_096, "metadata: 1 asked for, 0 sent"),
        (replace(COMPLETION, digests=0), 3, 4_096, "digests: 1 asked for, 0 sent"),
        (COMPLETION, 3, 4_000, "bytes: 4096 sent, 4000 landed"),
        (COMPLETION, 4, 5_000, "transfers: 3 sent, 4 landed; bytes: 4096 sent, 5000 landed"),
    ],
)
def test_a_whole_completion_record_that_disagrees_is_told_with_both_figures(
    completion, writes, nbytes, says
):
    with pytest.raises(CompletionDisagrees) as caught:
        has_arrived(EXPECTED, completion, writes, nbytes)
    assert f": {says}. Do both" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, None),
        ({"pages": 2}, "pages: 3 asked for, 2 sent"),
        ({"nbytes": 999}, f"bytes: 999 sent, {COMPLETION_BYTES} landed"),
        ({"aux": 0}, "metadata: 1 asked for, 0 sent"),
    ],
)
def test_a_source_that_ends_with_less_than_was_asked_for_fails_the_room_at_once(change, says):
    """The source's engine writes a completion record and nothing else."""
    with handover(verify=(Verify.OFF, Verify.OFF)) as pair:
        source = pair.prefill.engine  # Which alone may write under the room's tag.
        pair.decode.know(pair.address)
        _, room = pair.open_both(1)
        pair.name_pages(room, [4, 5, 6], aux=0)
        until(lambda: room.view.state is RoomState.REQUESTED, "the pages are published")
        (expected,) = room.view.expected
        sent = CompletionRecord(
            room.view.generation,
            writes=1,
            pages=3,
            page_layers=3 * LAYERS,
            states=0,
            aux=1,
            digests=0,
            nbytes=COMPLETION_BYTES,
        )
        memory = np.frombuffer(bytearray(completion_bytes(replace(sent, **change))), np.uint8)
        near = source.register(memory)
        slot = pair.decode.completions.buffers.addresses[0] + expected.slot * COMPLETION_BYTES
        peer = source.connect(pair.decode.engine.card())
        transfer = peer.write(te.Blocks.of(near.address, slot, COMPLETION_BYTES), tag=expected.tag)
        assert transfer.wait(WAIT_S) is te.Status.DONE
        assert pair.decode.side.has_arrived(room) == (says is None)
        if says is not None:
            until(lambda: room.view.over, "the room has failed")
            assert room.view.state is RoomState.FAILED
            assert says in (room.view.reason or "")


def test_no_other_engine_writes_under_the_tag_of_a_room():
    """Not even one that has been told it."""
    with handover() as pair, te.Engine(te.Config()) as stranger:
        pair.decode.know(pair.address)
        _, room = pair.open_both(1)
        pair.name_pages(room, [4], aux=0)
        until(lambda: room.view.state is RoomState.REQUESTED, "the pages are published")
        (expected,) = room.view.expected
        memory = np.full(COMPLETION_BYTES, 7, np.uint8)
        stranger.register(memory, remote="none")
        peer = stranger.connect(pair.decode.engine.card())
        slot = pair.decode.completions.buffers.addresses[0] + expected.slot * COMPLETION_BYTES
        blocks = te.Blocks.of(memory.ctypes.data, slot, COMPLETION_BYTES)
        with pytest.raises(te.TransferFailed, match=f"the tag {expected.tag:#x} is not open here"):
            peer.write(blocks, tag=expected.tag).wait(WAIT_S)
        with pytest.raises(te.TransferFailed, match="peers may not write without a tag"):
            peer.write(blocks).wait(WAIT_S)
        assert pair.decode.engine.arrived(expected.tag) == 0
