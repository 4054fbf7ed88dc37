# SPDX-License-Identifier: Apache-2.0
"""What SGLang's prefill scheduler gives a sender while its GPU is still at work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from handover import CANARY, Handover, handover, make_context, until

from sglang_mooncake.context import Deadlines
from sglang_mooncake.rooms.states import RoomState

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


class Event:
    """One of a stream that the test moves on."""

    def __init__(self) -> None:
        self.happened = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.happened


@pytest.fixture
def pair() -> Iterator[Handover]:
    with handover() as pair:
        pair.decode.know(pair.address)
        yield pair


def make_sender(pair: Handover, room: int, pins_host_memory: bool = True):
    from sglang_mooncake.sglang.sender import KVSender

    manager = SimpleNamespace(
        prefill_side=pair.prefill.side,
        named_port=None,
        context=make_context("prefill", pair.address, Deadlines()),
        recorder=SimpleNamespace(scheduler_call=lambda _name: nullcontext()),
        pins_host_memory=pins_host_memory,
        stages=None,
    )
    return KVSender(manager, pair.address, room)


def ready(pair: Handover, room: int, pages: list[int]):
    """A sender and the decode side's room, which waits for these pages."""
    sender = make_sender(pair, room)
    target = pair.decode.side.new_room(room)
    pair.decode.side.choose_sources(target, pair.address, 0)
    until(lambda: target.view.state is RoomState.READY, "the decode room is ready")
    pair.name_pages(target, pages, aux=0)
    sender.init(len(pages), aux_index=1)
    until(lambda: sender.room.view.state is RoomState.READY, "the prefill room is ready")
    return sender, target


def copied(pair: Handover, sources: list[int], targets: list[int]) -> None:
    expected = np.full_like(pair.target.kv, CANARY)
    expected[:, targets] = pair.source.kv[:, sources]
    np.testing.assert_array_equal(pair.target.kv, expected)


def test_page_numbers_in_a_tensor_are_read_behind_their_event(pair):
    sender, target = ready(pair, 5, [10, 11, 12])
    assert sender.supports_host_tensor_indices
    late, event = torch.zeros(3, dtype=torch.int32), Event()
    sender.send(late, [], num_kv_tokens=12, indices_event=event)
    until(lambda: event.asked > 3, "the event is waited for")
    assert sender.room.view.state is RoomState.READY, "nothing was written before it"
    late.copy_(torch.tensor([7, 3, 4]))
    event.happened = True
    until(lambda: sender.poll() and pair.decode.side.has_arrived(target), "the room has arrived")
    copied(pair, [7, 3, 4], [10, 11, 12])


def test_a_chunk_waits_for_its_pages_and_for_their_numbers(pair):
    sender, target = ready(pair, 6, [20, 21, 22])
    late, filled, numbered = torch.zeros(2, dtype=torch.int32), Event(), Event()
    sender._early_send_wait_event = filled
    sender.send(late, None, num_kv_tokens=8, indices_event=numbered)
    assert sender._early_send_wait_event is None, "it was for that chunk"
    sender.send(np.array([5], np.int32), [], num_kv_tokens=4)
    numbered.happened = True
    sender.poll()
    until(lambda: filled.asked > 3, "the pages are waited for")
    late.copy_(torch.tensor([1, 2]))
    assert sender.room.view.state is RoomState.READY, "the last chunk did not overtake"
    filled.happened = True
    until(lambda: sender.poll() and pair.decode.side.has_arrived(target), "the room has arrived")
    copied(pair, [1, 2, 5], [20, 21, 22])


def test_without_a_gpu_the_scheduler_is_asked_for_plain_numbers(pair):
    from sglang_mooncake.sglang.seam import pins_host_memory

    assert not pins_host_memory()
    assert not make_sender(pair, 7, pins_host_memory=False).supports_host_tensor_indices
