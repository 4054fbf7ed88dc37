# SPDX-License-Identifier: Apache-2.0
"""All ranks of a prefill and a decode instance, of any topology, without SGLang: real engines,
sockets and registry around memory whose every byte is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
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

from bootstrap_server import BootstrapServer, RankCoords, Topology
from bootstrap_server.ranks.matching import CPTransfer, PageShare, holding
from sglang_mooncake.layout import Buffers, Component, Layout, Place, Units
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

Bytes = npt.NDArray[np.uint8]

PAGES, STATE_SLOTS = 32, 8


@dataclass(frozen=True)
class Model:
    """heads: KV heads, or 1 for an MLA latent. channels: of the state that every layer keeps for a
    request, dealt out like heads; 0 for a model without state."""

    heads: int = 4
    is_mla: bool = False
    layers: int = 4
    head_nbytes: int = 8
    page_size: int = 4
    channels: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("latent",) if self.is_mla else ("k", "v")

    def truth(self, room: int, pages: int) -> tuple[Bytes, Bytes, Bytes]:
        """What the request of this room left: KV (kind, layer, page, token, head, byte), state
        (layer, channel, byte) and metadata (byte)."""
        rng = np.random.default_rng(room)
        shape = (len(self.kinds), self.layers, pages, self.page_size, self.heads, self.head_nbytes)
        return (
            rng.integers(0, 256, shape, dtype=np.uint8),
            rng.integers(0, 256, (self.layers, self.channels, 4), dtype=np.uint8),
            rng.integers(0, 256, AUX_BYTES, dtype=np.uint8),
        )


class RankMemory:
    """The part of the model that the rank at `place` stores: nothing but the canary at first."""

    def __init__(self, model: Model, place: Place, pages: int = PAGES) -> None:
        self.model, self.place = model, place
        topology, coords = place.topology, place.coords
        share = model.layers // topology.pp_size
        self.layers = range(coords.pp * share, (coords.pp + 1) * share)
        self.heads = holding(model.heads, topology.tp_size, coords.tp)
        self.channels = (
            holding(model.channels, topology.tp_size, coords.tp) if model.channels else range(0)
        )
        kinds, heads = len(model.kinds), len(self.heads)
        self.kv = np.full(
            (kinds, share, pages, model.page_size, heads, model.head_nbytes), CANARY, np.uint8
        )
        self.state = np.full((share, STATE_SLOTS, max(len(self.channels), 1), 4), CANARY, np.uint8)
        self.aux = np.full((AUX_SLOTS, AUX_BYTES), CANARY, np.uint8)

    def ranges(self) -> list[tuple[int, int]]:
        return [(memory.ctypes.data, memory.nbytes) for memory in (self.kv, self.state, self.aux)]

    def layout(self, completions: Buffers) -> Layout:
        model = self.model
        heads = Units(model.heads, model.head_nbytes)
        components = [
            Component(kind, tuple(self.layers), _per_layer(array), (heads,), rows=model.page_size)
            for kind, array in zip(model.kinds, self.kv, strict=True)
        ]
        if model.channels:
            channels = Units(model.channels, 4)
            buffers = _per_layer(self.state)
            components.append(Component("conv", tuple(self.layers), buffers, (channels,), state=0))
        return Layout(
            page_size=model.page_size,
            dtype="float32",
            kv_layout=None,
            components=tuple(components),
            aux=Buffers((self.aux.ctypes.data,), (AUX_BYTES,), (self.aux.nbytes,)),
            completions=completions,
            states=("conv",) if model.channels else (),
        )

    def part(self, truth: tuple[Bytes, Bytes, Bytes]) -> tuple[Bytes, Bytes, Bytes]:
        """What of the truth belongs here."""
        kv, state, aux = truth
        layers, heads, channels = (
            slice(span.start, span.stop) for span in (self.layers, self.heads, self.channels)
        )
        return kv[:, layers, :, :, heads], state[layers, channels], aux


def _per_layer(array: Bytes) -> Buffers:
    """Buffers of an array whose axes are layer, item, and what is in an item."""
    layers = range(len(array))
    return Buffers(
        tuple(array[layer].ctypes.data for layer in layers),
        tuple(array[layer, 0].nbytes for layer in layers),
        tuple(array[layer].nbytes for layer in layers),
    )


@dataclass
class Handed:
    """One room, on every rank that takes part."""

    room: int
    sources: dict[RankCoords, Room]
    targets: dict[RankCoords, Room]
    #: What each rank puts where: pages, state slot, metadata slot.
    places: dict[tuple[str, RankCoords], tuple[list[int], int, int]] = field(default_factory=dict)

    @property
    def uses(self) -> list[Room]:
        return [*self.sources.values(), *self.targets.values()]


class Ranks:
    """Both instances. Prefill ranks hold the truth only where they are to send it from (in
    `CPTransfer` terms), so that a byte from anywhere else is seen. pages: of each rank."""

    def __init__(
        self,
        model: Model,
        prefill: Topology,
        decode: Topology,
        *,
        cp: CPTransfer = CPTransfer.FIRST,
        decode_model: Model | None = None,
        pages: int = PAGES,
        transports: tuple[str, ...] = (),
    ) -> None:
        self.model, self.cp, self._pages = model, cp, pages
        config = patient(Config(transports=transports))
        self._close = ExitStack()
        server = BootstrapServer(host=HOST, port=0, lease_s=NEVER_S)
        self._close.callback(server.close)
        self.address = f"{HOST}:{server.port}"
        self.memory: dict[tuple[str, RankCoords], RankMemory] = {}
        self.prefill: dict[RankCoords, PrefillRank] = {}
        self.decode: dict[RankCoords, DecodeRank] = {}
        for coords in prefill.coords():
            memory = self._memory("prefill", model, Place(prefill, coords))
            context = self._context("prefill", memory.place)
            self.prefill[coords] = PrefillRank(context, config, memory)
            self._close.callback(self.prefill[coords].close)
        for coords in decode.coords():
            memory = self._memory("decode", decode_model or model, Place(decode, coords))
            context = replace(
                self._context("decode", memory.place), all_cp_ranks=cp is CPTransfer.PAGES
            )
            self.decode[coords] = DecodeRank(context, config, memory)
            self._close.callback(self.decode[coords].close)
        for rank in self.decode.values():
            rank.know(self.address)

    def close(self) -> None:
        self._close.close()

    def _memory(self, role: str, model: Model, place: Place) -> RankMemory:
        memory = self.memory[role, place.coords] = RankMemory(model, place, self._pages)
        return memory

    def _context(self, role, place):
        address = self.address if role == "prefill" else ""
        return make_context(
            role, address, PATIENT, self.model.page_size, place.topology, place.coords
        )

    def open(self, room: int, prefill_dp: int = 0, decode_dp: int = 0) -> Handed:
        """The room on every rank, without pages."""
        handed = Handed(room, {}, {})
        for coords, rank in self.prefill.items():
            if coords.dp == prefill_dp:
                handed.sources[coords] = rank.side.open_room(room, register_dp_rank=False)
        for coords, rank in self.decode.items():
            if coords.dp == decode_dp:
                use = handed.targets[coords] = rank.side.new_room(room)
                rank.side.choose_sources(use, self.address, prefill_dp)
        return handed

    def name_pages(self, handed: Handed, pages: int, prefix: int = 0) -> None:
        """Every rank takes other pages and slots; prefill ranks fill theirs with the truth."""
        rng = np.random.default_rng(handed.room + 1)
        truth = self.model.truth(handed.room, pages)
        for role, uses in (("prefill", handed.sources), ("decode", handed.targets)):
            for coords in uses:
                where = (
                    rng.permutation(PAGES)[:pages].tolist(),
                    int(rng.integers(STATE_SLOTS)),
                    int(rng.integers(AUX_SLOTS)),
                )
                handed.places[role, coords] = where
                if role == "prefill":
                    self._fill(self.memory[role, coords], where, truth)
        for coords, room in handed.targets.items():
            until(
                lambda room=room: room.view.state is not RoomState.OPEN, "the decode room is ready"
            )
            assert room.view.state is RoomState.READY, room.view.reason
            pages_, slot, aux = handed.places["decode", coords]
            states = (np.array([slot]),) if self.model.channels else ()
            self.decode[coords].side.name_pages(room, np.array(pages_), aux, prefix, states)

    def _fill(self, memory: RankMemory, where, truth) -> None:
        pages, slot, aux_slot = where
        kv, state, aux = memory.part(truth)
        coords, topology = memory.place.coords, memory.place.topology
        share = PageShare(coords.cp, topology.cp_size)
        if self.cp is CPTransfer.FIRST:
            share = PageShare(0, 1) if coords.cp == 0 else PageShare(0, 0)
        for at in share.bounds(len(pages)):
            memory.kv[:, :, pages[at]] = kv[:, :, at]
        if coords.cp == 0:
            memory.state[:, slot, : state.shape[1]] = state
            if coords.pp == topology.pp_size - 1 or self.decode_stages > 1:
                memory.aux[aux_slot] = aux

    @property
    def decode_stages(self) -> int:
        return 1 + max(coords.pp for coords in self.decode)

    def send(self, handed: Handed, coords: RankCoords, chunks: list[int]) -> None:
        """All pages of one prefill rank, in chunks of so many pages."""
        pages, slot, aux = handed.places["prefill", coords]
        first = 0
        for nth, count in enumerate(chunks, 1):
            last = nth == len(chunks)
            self.prefill[coords].side.send_chunk(
                handed.sources[coords],
                Chunk(
                    np.array(pages[first : first + count], np.int64),
                    first,
                    aux if last else None,
                    time.monotonic(),
                    states=(np.array([slot]),) if last and self.model.channels else (),
                ),
            )
            first += count
        assert first == len(pages)

    def complete(self, room: int, chunks: list[int], prefill_dp: int = 0, decode_dp: int = 0):
        """One whole hand-over, and a look at every byte."""
        handed = self.open(room, prefill_dp, decode_dp)
        self.name_pages(handed, sum(chunks))
        for coords, use in handed.sources.items():
            until(lambda use=use: use.view.state is not RoomState.OPEN, f"{coords} was asked")
            assert use.view.state is RoomState.READY, use.view.reason
            self.send(handed, coords, chunks)
        self.arrive(handed)
        self.check(handed)
        landed = sum(use.view.landed_nbytes for use in handed.sources.values())
        assert landed == self.cached_nbytes(handed), "figures of SGLang's are made of it"
        return handed

    def cached_nbytes(self, handed: Handed) -> int:
        """Of the request on all decode ranks, copies of a head counted as often as they are kept;
        without metadata."""
        total = 0
        for coords in handed.targets:
            pages, _, _ = handed.places["decode", coords]
            kv, state, _ = self.memory["decode", coords].part(
                self.model.truth(handed.room, len(pages))
            )
            total += kv.nbytes + (state.nbytes if self.model.channels else 0)
        return total

    def arrive(self, handed: Handed) -> None:
        """Waits for every byte, takes the room on every rank, and sees it done everywhere."""
        for coords, room in handed.targets.items():
            side = self.decode[coords].side
            until(lambda: side.has_arrived(room) or room.view.over, f"{coords} has it")  # noqa: B023
            assert not room.view.over, room.view.reason
            side.arrived(room)
        for room in handed.uses:
            until(lambda room=room: room.view.over, "the room is over")
            assert room.view.state is RoomState.DONE, room.view.reason

    def check(self, handed: Handed) -> None:
        """Named pages, slots and metadata equal the truth; every other byte is the canary."""
        for coords in handed.targets:
            memory = self.memory["decode", coords]
            pages, slot, aux_slot = handed.places["decode", coords]
            kv, state, aux = memory.part(self.model.truth(handed.room, len(pages)))
            expected = RankMemory(memory.model, memory.place)
            expected.kv[:, :, pages] = kv
            expected.aux[aux_slot] = aux
            if self.model.channels:
                expected.state[:, slot] = state
            for name in ("kv", "state", "aux"):
                np.testing.assert_array_equal(
                    getattr(memory, name), getattr(expected, name), f"{name} of {coords}"
                )
                getattr(memory, name)[:] = CANARY


@contextmanager
def ranks(model: Model, prefill: Topology, decode: Topology, **options) -> Iterator[Ranks]:
    """All of it is gone afterwards."""
    made = Ranks(model, prefill, decode, **options)
    try:
        yield made
    finally:
        made.close()
