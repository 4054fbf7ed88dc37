# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold a part of the pages, or of a page's tokens: real engines and sockets around
memory of which every byte is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from handover import (
    AUX_BYTES,
    AUX_SLOTS,
    CANARY,
    HOST,
    NEVER_S,
    PATIENT,
    DecodeRank,
    PrefillRank,
    make_context,
    patient,
    until,
)

from bootstrap_server import BootstrapServer, Topology
from sglang_mooncake.layout import ALL, Buffers, Component, Dealt, Layout, Units
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

PAGES, PAGE, WIDTH, LAYERS = 32, 4, 8, 2
#: Numbers of the request's pages, by which they are dealt out; and of decode's.
NUMBERS, NAMED = [6, 2, 9, 4, 7], [11, 3, 5, 8, 1]
#: What each layer's page holds, by position in the request.
TRUTH = np.random.default_rng(5).integers(
    0, CANARY, (LAYERS, len(NUMBERS), PAGE, WIDTH), dtype=np.uint8
)


class Memory:
    """Latents of a rank, and, with `drafted`, a second pool that lies on the device."""

    def __init__(self, pages: Dealt = ALL, tokens: Dealt = ALL, drafted: bool = False) -> None:
        self.pages, self.tokens, self.drafted = pages, tokens, drafted
        self.on_device = False
        self.kv = np.full((LAYERS, PAGES, PAGE, WIDTH), CANARY, np.uint8)
        self.draft = np.full((LAYERS, PAGES, PAGE, WIDTH), CANARY, np.uint8)
        self.aux = np.full((AUX_SLOTS, AUX_BYTES), CANARY, np.uint8)

    def ranges(self) -> list[tuple[int, int]]:
        return [(one.ctypes.data, one.nbytes) for one in (self.kv, self.draft, self.aux)]

    def layout(self, completions: Buffers) -> Layout:
        made = [self._component("latent", self.kv)]
        if self.drafted:
            draft = self._component("draft latent", self.draft)
            made.append(
                Component(
                    draft.kind,
                    draft.layers,
                    draft.buffers,
                    draft.cuts,
                    PAGE,
                    on_device=self.on_device,
                )
            )
        return Layout(
            page_size=PAGE,
            dtype="float32",
            kv_layout=None,
            components=tuple(made),
            aux=Buffers((self.aux.ctypes.data,), (AUX_BYTES,), (self.aux.nbytes,)),
            completions=completions,
            pages_dealt=self.pages,
            tokens_dealt=self.tokens,
        )

    def _component(self, kind: str, array: np.ndarray) -> Component:
        buffers = Buffers(
            tuple(array[layer].ctypes.data for layer in range(LAYERS)),
            (PAGE * WIDTH,) * LAYERS,
            (array[0].nbytes,) * LAYERS,
        )
        return Component(kind, tuple(range(LAYERS)), buffers, (Units(1, WIDTH),), rows=PAGE)


class Ranks:
    """All ranks of both instances; `prefill` and `decode` are the memories of their TP ranks."""

    def __init__(
        self, prefill: list[Memory], decode: list[Memory], sharded: bool, dcp: int, close: ExitStack
    ) -> None:
        server = BootstrapServer(host=HOST, port=0, lease_s=NEVER_S)
        close.callback(server.close)
        self.address = f"{HOST}:{server.port}"
        self.memories = decode
        here, there = Topology(1, 1, len(prefill), 1), Topology(1, 1, len(decode), 1)
        config = patient(Config())
        self.prefill = []
        for coords, memory in zip(here.coords(), prefill, strict=True):
            context = make_context(
                "prefill", self.address, PATIENT, PAGE, here, coords,
                enable_kv_cache_sharding=sharded,
            )  # fmt: skip
            self.prefill.append(PrefillRank(context, config, memory))
            close.callback(self.prefill[-1].close)
        self.decode = []
        for coords, memory in zip(there.coords(), decode, strict=True):
            context = make_context("decode", "", PATIENT, PAGE, there, coords, dcp_size=dcp)
            self.decode.append(DecodeRank(context, config, memory))
            close.callback(self.decode[-1].close)
            self.decode[-1].know(self.address)

    def run(
        self, named: list[int], chunks: list[int], device: list[int] | None = None
    ) -> list[Room]:
        """One room, as far as the last chunk; the uses of the decode ranks."""
        sources = [rank.side.open_room(1, register_dp_rank=False) for rank in self.prefill]
        targets = []
        for rank in self.decode:
            room = rank.side.new_room(1)
            rank.side.choose_sources(room, self.address, 0)
            targets.append(room)
        for rank, room in zip(self.decode, targets, strict=True):
            until(
                lambda room=room: room.view.state is not RoomState.OPEN, "the decode room is ready"
            )
            pages = None if device is None else np.array(device)
            rank.side.name_pages(room, np.array(named), 0, 0, (), pages)
        for rank, room in zip(self.prefill, sources, strict=True):
            until(lambda room=room: room.view.state is not RoomState.OPEN, "it was asked")
            assert room.view.state is RoomState.READY, room.view.reason
            first = 0
            for count in chunks:
                last = first + count == len(NUMBERS)
                pages = np.array(NUMBERS[first : first + count])
                chunk = Chunk(pages, first, 0 if last else None, time.monotonic())
                rank.side.send_chunk(room, chunk)
                first += count
            rank.side.polled(room, sent=True)
        return targets

    def arrive(self, targets: list[Room]) -> None:
        for rank, room in zip(self.decode, targets, strict=True):
            until(
                lambda r=rank, v=room: r.side.has_arrived(v) or v.view.over, "the room has arrived"
            )
            assert not room.view.over, room.view.reason


@contextmanager
def ranks(
    prefill: list[Memory], decode: list[Memory], sharded: bool = False, dcp: int = 1
) -> Iterator[Ranks]:
    with ExitStack() as close:
        yield Ranks(prefill, decode, sharded, dcp, close)


def shards(of: int) -> list[Memory]:
    """Each with its part of the truth."""
    made = [Memory(pages=Dealt(index, of)) for index in range(of)]
    for at, number in enumerate(NUMBERS):
        made[number % of].kv[:, number // of] = TRUTH[:, at]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[5], [1, 1, 3], [2, 3]])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (4, 4), (2, 1)])
def test_pages_that_are_dealt_out_come_from_each_rank_that_has_some(prefill, decode, chunks):
    with ranks(shards(prefill), [Memory() for _ in range(decode)], sharded=True) as both:
        both.arrive(both.run(NAMED, chunks))
        for memory in both.memories:
            expected = np.full_like(memory.kv, CANARY)
            expected[:, NAMED] = TRUTH
            np.testing.assert_array_equal(memory.kv, expected)


def test_parts_that_are_not_the_whole_fail_the_room():
    """Two ranks that both take themselves for the first part."""
    first, _ = shards(2)
    with ranks([first, first], [Memory()], sharded=True) as both:
        (room,) = both.run(NAMED, [5])
        (rank,) = both.decode
        until(lambda: not rank.side.has_arrived(room) and room.view.over, "the room has failed")
        assert room.view.reason is not None
        assert "have sent 6 pages where 5 were asked for" in room.view.reason


@pytest.mark.parametrize("chunks", [[5], [1, 3, 1]])
@pytest.mark.parametrize("dcp", [2, 4])
def test_tokens_that_are_dealt_out_go_to_the_ranks_whose_they_are(dcp, chunks):
    whole = Memory()
    whole.kv[:, NUMBERS] = TRUTH
    named = NAMED[: -(-len(NUMBERS) // dcp)]
    parts = [Memory(tokens=Dealt(index, dcp)) for index in range(dcp)]
    with ranks([whole], parts, dcp=dcp) as both:
        both.arrive(both.run(named, chunks))
        for memory in both.memories:
            expected = np.full_like(memory.kv, CANARY)
            for token in range(memory.tokens.index, len(NUMBERS) * PAGE, dcp):
                page, row = divmod(token // dcp, PAGE)
                expected[:, named[page], row] = TRUTH[:, token // PAGE, token % PAGE]
            np.testing.assert_array_equal(memory.kv, expected)


def test_pages_on_the_host_and_on_the_device_have_numbers_of_their_own():
    source, target = Memory(drafted=True), Memory(drafted=True)
    source.kv[:, NUMBERS] = TRUTH
    source.draft[:, NUMBERS] = TRUTH[:, ::-1]
    target.on_device = True
    device = [20, 21, 25, 24, 2]
    with ranks([source], [target]) as both:
        both.arrive(both.run(NAMED, [2, 3], device))
        np.testing.assert_array_equal(target.kv[:, NAMED], TRUTH)
        np.testing.assert_array_equal(target.draft[:, device], TRUTH[:, ::-1])
        assert (np.delete(target.draft, device, axis=1) == CANARY).all()


def test_a_decode_rank_that_names_too_few_pages_for_its_tokens_is_told():
    whole, parts = Memory(), [Memory(tokens=Dealt(index, 2)) for index in range(2)]
    with ranks([whole], parts, dcp=2) as both:
        for room in both.run(NAMED[:2], [5]):
            until(lambda room=room: room.view.over, "the room has failed")
            assert "made room for 4 pages" in (room.view.reason or "")


def test_there_is_no_part_beyond_the_last():
    with pytest.raises(ValueError, match="no part 2 of 2"):
        Dealt(2, 2)
