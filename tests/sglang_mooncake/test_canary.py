# SPDX-License-Identifier: Apache-2.0
"""Pages of aborted rooms belong to the decode rank alone. They are filled with a pattern and
watched while the prefill rank, a process of its own that was in the middle of writing them, is
frozen and continued, and never hears of the abort. Without the fence they change."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from handover import (
    FIRST,
    HOST,
    NEVER_S,
    PATIENT,
    DecodeRank,
    Pool,
    PrefillRank,
    make_context,
    patient,
    until,
)
from te_far import FarEngine, main

from bootstrap_server import BootstrapServer
from sglang_mooncake.layout import Buffers, Component, Layout, Units
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import ENDS, RoomState
from sglang_mooncake.sglang.config import Config

WATCH_S = 60.0
PAGES, PAGE_BYTES = 32, 1 << 20
#: All into the same pages, so that much is still to be written whenever the freeze comes.
FIRST_HALF, SECOND_HALF = range(1, 17), range(17, 33)
PATTERN = 0xCA


class Pages:
    """One layer of large pages, with a slot of metadata for each room."""

    def __init__(self, seed: int | None = None) -> None:
        self.small = Pool(seed)
        self.kv = np.full((PAGES, PAGE_BYTES), 0 if seed is None else seed, np.uint8)

    def ranges(self) -> list[tuple[int, int]]:
        return [*self.small.ranges(), (self.kv.ctypes.data, self.kv.nbytes)]

    def layout(self, completions: Buffers) -> Layout:
        small = self.small.layout(completions)
        return Layout(
            page_size=small.page_size,
            dtype=small.dtype,
            kv_layout=None,
            components=(
                Component(
                    "latent",
                    layers=(0,),
                    buffers=Buffers((self.kv.ctypes.data,), (PAGE_BYTES,), (self.kv.nbytes,)),
                    cuts=(Units(1, PAGE_BYTES),),
                ),
            ),
            aux=small.aux,
            completions=completions,
        )


class Prefill:
    """The far end: a prefill rank with its registry, driven by lines of JSON."""

    def start(self, config: dict[str, str]) -> str:
        self.server = BootstrapServer(host=HOST, port=0, lease_s=NEVER_S)
        address = f"{HOST}:{self.server.port}"
        # Once it goes on it is to write: no heartbeat may have ended its link.
        context = make_context("prefill", address, PATIENT)
        settings = patient(Config(transports=(config["transport"],)))
        self.memory = Pages(seed=1)  # ranks do not keep it
        self.rank = PrefillRank(context, settings, self.memory)
        self.rooms: dict[int, Room] = {}
        return address

    def open_room(self, room: int) -> None:
        self.rooms[room] = self.rank.side.open_room(room, register_dp_rank=False)

    def ready(self) -> bool:
        return all(room.view.state is RoomState.READY for room in self.rooms.values())

    def send(self, rooms: list[int]) -> None:
        for room in map(self.rooms.__getitem__, rooms):
            self.rank.send(room, list(range(PAGES)), 0, aux_slot=0)

    def ended(self) -> bool:
        return all(room.view.state in ENDS for room in self.rooms.values())


class FarPrefill(FarEngine):
    program = __file__


@dataclass
class Case:
    transport: str
    far: FarPrefill
    decode: DecodeRank
    target: Pages
    uses: list[Room]
    frozen: bool = False

    @property
    def nbytes_received(self) -> int:
        return self.decode.engine.stats().bytes_received

    def freeze(self) -> None:
        self.far.signal(signal.SIGSTOP)
        self.frozen = True

    def go_on(self) -> None:
        self.far.signal(signal.SIGCONT)
        self.frozen = False

    def abort_in_the_middle(self) -> None:
        """Freezes the prefill rank while it writes; then all clients leave, and no word of that
        gets through to it."""
        self.far.send(rooms=list(FIRST_HALF))
        until(lambda: self.nbytes_received > 0, "bytes land")
        self.freeze()
        self.decode.side._links._send = lambda link, frame: None  # type: ignore[method-assign]
        for room in self.uses:
            self.decode.side.abort(room, "the client has gone")
        until(lambda: all(room.releasable for room in self.uses), "all pages are given back")

    def go_on_writing(self) -> None:
        """What is under way, and rooms of which nothing has been written yet."""
        self.go_on()
        self.far.send(rooms=list(SECOND_HALF))

    def fill(self) -> None:
        self.target.kv[:] = PATTERN

    def changed(self) -> bool:
        return bool((self.target.kv != PATTERN).any())


@contextmanager
def case(transport: str) -> Iterator[Case]:
    far = FarPrefill(transport=transport)
    try:
        address = far.engine_id  # what `start` has returned
        target = Pages()
        settings = patient(Config(transports=(transport,)))
        decode = DecodeRank(make_context("decode", "", PATIENT), settings, target)
        try:
            decode.know(address)
            uses = []
            for room in (*FIRST_HALF, *SECOND_HALF):
                far.open_room(room=room)
                use = decode.side.new_room(room)
                decode.side.choose_sources(use, address, FIRST.dp)
                until(lambda use=use: use.view.state is RoomState.READY, "the room is ready")
                decode.side.name_pages(use, np.arange(PAGES), 0, 0)
                uses.append(use)
            until(far.ready, "the prefill rank may send")
            yield Case(transport, far, decode, target, uses)
        finally:
            decode.close()
    finally:
        far.end()


over_each = pytest.mark.parametrize(
    "transports",
    # Side by side: they only wait.
    [("tcp", "samehost"), pytest.param(("rdma",), marks=pytest.mark.rdma)],
    ids=["tcp-and-samehost", "rdma"],
)


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.timeout(300)
@over_each
def test_nothing_reaches_pages_that_were_given_back(transports):
    chance = random.Random(1)
    with ExitStack() as stack:
        cases = [stack.enter_context(case(transport)) for transport in transports]
        for one in cases:
            one.abort_in_the_middle()
            one.fill()
            one.go_on_writing()
        end_s = time.monotonic() + WATCH_S
        while time.monotonic() < end_s:
            for one in cases:
                (one.go_on if one.frozen else one.freeze)()
            turn_s = time.monotonic() + chance.uniform(0.1, 4.0)
            while time.monotonic() < turn_s:
                time.sleep(0.25)
                for one in cases:
                    assert not one.changed(), f"bytes have landed over {one.transport}"
        for one in cases:
            one.go_on()
            until(one.far.ended, "the prefill rank has given the rooms up")
            assert not one.changed()
            assert (one.target.small.kv == one.target.small.kv.flat[0]).all()


@pytest.mark.slow
@pytest.mark.by_turns
@pytest.mark.timeout(300)
@over_each
def test_without_the_fence_they_change(transports):
    for transport in transports:
        with case(transport) as one:
            one.decode.side._fencer._fence = lambda tag, timeout_s: 0
            one.abort_in_the_middle()
            one.fill()
            one.go_on_writing()
            until(one.changed, f"bytes land over {transport}")


if __name__ == "__main__":
    main(Prefill())  # type: ignore[arg-type]
