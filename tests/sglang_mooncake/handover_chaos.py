# SPDX-License-Identifier: Apache-2.0
"""Requests in any order between ranks of any layout, all of which is compared by digests: a false
alarm ends the run, and so does a wrong byte. Real engines, sockets and registry, without SGLang.

As a program (`.venv/bin/python tests/sglang_mooncake/handover_chaos.py --seed 1`) it goes on until
a million pages were compared.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from fleet import STATE_SLOTS, Handed, Model, RankMemory, Ranks, ranks
from handover import AUX_SLOTS

from bootstrap_server import RankCoords, Topology
from sglang_mooncake.rooms.prefill import Chunk
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState

__all__ = ["SHAPES", "Counts", "Traffic", "Wrong", "era"]

#: See `Model.truth`.
Truth = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
#: Of a rank; a prompt has so many at most.
PAGES, PROMPT_PAGES_MAX = 4096, 600
AT_ONCE = 6
assert min(STATE_SLOTS, AUX_SLOTS, PAGES // PROMPT_PAGES_MAX) >= AT_ONCE
#: A machine that is busy stops any thread for seconds.
STUCK_S = 120.0
TRANSPORTS = ("tcp", "samehost")


def _tp(size: int, pp: int = 1) -> Topology:
    return Topology(dp_size=1, cp_size=1, tp_size=size, pp_size=pp)


_GQA, _MLA, _STATE = Model(), Model(heads=1, is_mla=True), Model(channels=8)
#: Model, prefill and decode ranks.
SHAPES = {
    "tp1-tp1": (_GQA, _tp(1), _tp(1)),
    "tp1-tp2": (_GQA, _tp(1), _tp(2)),
    "tp2-tp1": (_GQA, _tp(2), _tp(1)),
    "tp2-tp4": (_GQA, _tp(2), _tp(4)),
    "tp4-tp1": (_GQA, _tp(4), _tp(1)),
    "tp2-tp2": (_GQA, _tp(2), _tp(2)),
    "heads-replicated": (Model(heads=2), _tp(4), _tp(2)),
    "pp2-tp2": (_GQA, _tp(1, pp=2), _tp(2)),
    "mla-tp1-tp2": (_MLA, _tp(1), _tp(2)),
    "mla-tp4-tp1": (_MLA, _tp(4), _tp(1)),
    "state-tp2-tp1": (_STATE, _tp(2), _tp(1)),
}


class Wrong(Exception):
    """A false alarm, a wrong byte, or a request that hangs."""


class Event:
    """Of a stream that gets there when it is told to."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def query(self) -> bool:
        return self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()


@dataclass
class Counts:
    """pages: of decode ranks, each compared in all of its layers and found right. equal: requests
    of a pair of ranks whose digests were equal."""

    pages: int = 0
    cells: int = 0
    equal: int = 0
    arrived: int = 0
    aborted: int = 0
    retried: int = 0
    by_layers: int = 0
    behind_events: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name} {number:,}" for name, number in vars(self).items())


@dataclass
class Free:
    """What of a rank's memory no request has."""

    pages: list[int] = field(default_factory=lambda: list(range(PAGES)))
    slots: list[int] = field(default_factory=lambda: list(range(STATE_SLOTS)))
    aux: list[int] = field(default_factory=lambda: list(range(AUX_SLOTS)))


@dataclass
class Client:
    """Leaves after so many steps of its request, as the prefill or the decode side hears first."""

    leaves_after: float
    side: str
    has_left: bool = False


class Traffic:
    """Requests between these ranks. One thread is all schedulers: it takes a step of one request
    after the other, in an order that the seed says.

    What a request does follows from the seed and its number alone: how many steps it takes follows
    from the machine, too, so that a generator that all share gave another run each time.
    """

    def __init__(self, all_ranks: Ranks, seed: int, counts: Counts) -> None:
        self._ranks, self._counts, self._seed = all_ranks, counts, seed
        self._random = np.random.default_rng(seed)
        self._free = {where: Free() for where in all_ranks.memory}
        self._next = 1

    def run(self, requests: int) -> None:
        """Raises Wrong."""
        under_way: list[Iterator[None]] = []
        moved_s, left = time.monotonic(), requests
        while left or under_way:
            while left and len(under_way) < AT_ONCE:
                under_way.append(self._request(self._next))
                self._next += 1
                left -= 1
            at = int(self._random.integers(len(under_way)))
            before = vars(self._counts).copy()
            try:
                next(under_way[at])
            except StopIteration:
                del under_way[at]
            if vars(self._counts) != before or not under_way:
                moved_s = time.monotonic()
            elif time.monotonic() > moved_s + STUCK_S:
                raise Wrong(f"no request has ended for {STUCK_S:g} s")
            else:
                time.sleep(1e-4)  # the ranks' threads are of this process, too
        different = [
            (coords, digests)
            for coords, rank in self._ranks.decode.items()
            if (digests := rank.recorder.totals()["digests"])["different"]
            or digests["not compared"]
        ]
        if different:
            raise Wrong(f"a false alarm, or nothing to compare: {different}")
        for rank in self._ranks.decode.values():
            digests = rank.recorder.totals()["digests"]
            self._counts.cells += int(digests["cells"])
            self._counts.equal += int(digests["equal"])

    # --- one request ---

    def _request(self, number: int) -> Iterator[None]:
        """Mostly again if its client leaves, by another number, as clients do."""
        while True:
            random = np.random.default_rng((self._seed, number))
            client, again = Client(np.inf, "decode"), random.random() < 0.7
            if random.random() < 0.4:
                steps = float(random.integers(1, 30))
                client = Client(steps, str(random.choice(["prefill", "decode"])))
            yield from self._try(number, client, random)
            if not client.has_left or not again:
                return
            self._counts.retried += 1
            number, self._next = self._next, self._next + 1

    def _try(self, number: int, client: Client, random: np.random.Generator) -> Iterator[None]:
        all_ranks = self._ranks
        handed = all_ranks.open(number)
        yield from self._until(lambda: _all(handed.targets, RoomState.READY), handed, client)
        count = int(random.integers(1, PROMPT_PAGES_MAX + 1))
        self._take(handed, count)
        truth = all_ranks.model.truth(number, count)
        if not client.has_left:
            for coords, room in handed.targets.items():
                pages, slot, aux = handed.places["decode", coords]
                states = (np.array([slot]),) if all_ranks.model.channels else ()
                side = all_ranks.decode[coords].side
                side.name_pages(room, np.array(pages), aux, 0, states)
        yield from self._until(lambda: _all(handed.sources, RoomState.READY), handed, client)
        if not client.has_left:
            yield from self._forward(handed, truth, client, random)
        waiting = dict(handed.targets)
        while waiting:
            for coords, room in list(waiting.items()):
                if self._ended(handed, coords, room, truth, client):
                    del waiting[coords]
            yield from self._step(handed, client)
        yield from self._until(
            lambda: all(r.view.over for r in handed.sources.values()), None, client
        )
        for coords in handed.sources:
            self._give("prefill", coords, handed)
        self._counts.aborted += client.has_left
        self._counts.arrived += not client.has_left

    def _forward(
        self, handed: Handed, truth: Truth, client: Client, random: np.random.Generator
    ) -> Iterator[None]:
        """Fills the prompt's pages chunk by chunk, and sends them: when they are filled, before
        (behind an event of the stream), or layer by layer."""
        count = len(next(iter(handed.places.values()))[0])
        cuts = sorted({count, *random.integers(1, count + 1, int(random.integers(0, 4))).tolist()})
        by_layers, first = random.random() < 0.4, 0
        self._counts.by_layers += by_layers
        for stop in cuts:
            span = range(first, stop)
            if by_layers:
                for below in range(1, self._ranks.model.layers):
                    event = Event()
                    for coords, room in handed.sources.items():
                        pages = handed.places["prefill", coords][0][span.start : span.stop]
                        side = self._ranks.prefill[coords].side
                        side.send_layers(room, np.array(pages), first, below, [event])
                    yield from self._step(handed, client)
                    self._fill(handed, truth, span, below)
                    event.happen()
            is_late, event = random.random() < 0.5, Event()
            self._counts.behind_events += is_late
            if not is_late:
                self._fill(handed, truth, span)
            for coords, room in handed.sources.items():
                self._send(handed, coords, room, span, stop == count, [event] if is_late else [])
            yield from self._step(handed, client)
            if is_late:
                self._fill(handed, truth, span)
                event.happen()
            first = stop

    def _send(
        self,
        handed: Handed,
        coords: RankCoords,
        room: Room,
        span: range,
        last: bool,
        events: list[Event],
    ) -> None:
        pages, slot, aux = handed.places["prefill", coords]
        chunk = Chunk(
            np.array(pages[span.start : span.stop], np.int64),
            span.start,
            aux if last else None,
            time.monotonic(),
            states=(np.array([slot]),) if last and self._ranks.model.channels else (),
        )
        side = self._ranks.prefill[coords].side
        side.send_chunk(room, chunk, events)
        side.polled(room, sent=last)

    def _ended(
        self,
        handed: Handed,
        coords: RankCoords,
        room: Room,
        truth: Truth,
        client: Client,
    ) -> bool:
        """Whether a decode rank's part has arrived, which is compared with the truth, or has failed
        since the client has left; its pages are others' from now on."""
        if room.view.over:
            if not client.has_left:
                raise Wrong(f"room {room.number} has failed: {room.view.reason}")
            if not room.releasable:
                return False
        else:
            side = self._ranks.decode[coords].side
            if not side.has_arrived(room):
                return False
            self._compare(handed, coords, truth)
            side.arrived(room)
            self._counts.pages += len(handed.places["decode", coords][0])
        self._give("decode", coords, handed)
        return True

    def _compare(self, handed: Handed, coords: RankCoords, truth: Truth) -> None:
        memory, model = self._ranks.memory["decode", coords], self._ranks.model
        pages, slot, aux_slot = handed.places["decode", coords]
        kv, state, aux = memory.part(truth)
        if not np.array_equal(memory.kv[:, :, pages], kv):
            raise Wrong(f"wrong pages of room {handed.room} on {coords}")
        if model.channels and not np.array_equal(memory.state[:, slot], state):
            raise Wrong(f"wrong state of room {handed.room} on {coords}")
        if not np.array_equal(memory.aux[aux_slot], aux):
            raise Wrong(f"wrong metadata of room {handed.room} on {coords}")

    # --- time, and clients that leave ---

    def _until(
        self, condition: Callable[[], bool], handed: Handed | None, client: Client
    ) -> Iterator[None]:
        """Or until the client has left. handed: None if nobody can leave any more."""
        while not (handed is not None and client.has_left) and not condition():
            yield from self._step(handed, client)

    def _step(self, handed: Handed | None, client: Client) -> Iterator[None]:
        client.leaves_after -= 1
        if handed is not None and client.leaves_after <= 0 and not client.has_left:
            client.has_left = True
            order = ["prefill", "decode"] if client.side == "prefill" else ["decode", "prefill"]
            for role in order:
                uses = handed.sources if role == "prefill" else handed.targets
                ranks_of = self._ranks.prefill if role == "prefill" else self._ranks.decode
                for coords, room in uses.items():
                    ranks_of[coords].side.abort(room, "the client has left")
                yield
        yield

    # --- memory ---

    def _take(self, handed: Handed, count: int) -> None:
        """Pages and slots of every rank, in any order."""
        for role, uses in (("prefill", handed.sources), ("decode", handed.targets)):
            for coords in uses:
                free = self._free[role, coords]
                at = set(self._random.choice(len(free.pages), count, replace=False).tolist())
                taken = [page for i, page in enumerate(free.pages) if i in at]
                free.pages = [page for i, page in enumerate(free.pages) if i not in at]
                self._random.shuffle(taken)
                handed.places[role, coords] = taken, free.slots.pop(), free.aux.pop()

    def _give(self, role: str, coords: RankCoords, handed: Handed) -> None:
        """Others use it at once, for something else."""
        pages, slot, aux = handed.places[role, coords]
        memory = self._ranks.memory[role, coords]
        memory.kv[:, :, pages] = self._random.integers(256)
        memory.state[:, slot] = self._random.integers(256)
        memory.aux[aux] = self._random.integers(256)
        free = self._free[role, coords]
        free.pages.extend(pages)
        free.slots.append(slot)
        free.aux.append(aux)

    def _fill(
        self,
        handed: Handed,
        truth: Truth,
        span: range,
        below: int | None = None,
    ) -> None:
        """Layers below that number, or all of them and the rest."""
        for coords in handed.sources:
            memory: RankMemory = self._ranks.memory["prefill", coords]
            pages, slot, aux_slot = handed.places["prefill", coords]
            kv, state, aux = memory.part(truth)
            layers = len(memory.layers) if below is None else max(below - memory.layers.start, 0)
            some, at = slice(0, layers), slice(span.start, span.stop)
            memory.kv[:, some, pages[at]] = kv[:, some, at]
            if below is None:
                memory.state[:, slot, : state.shape[1]] = state
                memory.aux[aux_slot] = aux


def _all(uses: dict[RankCoords, Room], state: RoomState) -> bool:
    for room in uses.values():
        if room.view.over:
            raise Wrong(f"room {room.number} has failed: {room.view.reason}")
    return all(room.view.state is state for room in uses.values())


def era(shape: str, transport: str, requests: int, seed: int, counts: Counts) -> None:
    """So many requests between ranks of that shape, into `counts`. Raises Wrong."""
    model, prefill, decode = SHAPES[shape]
    with ranks(model, prefill, decode, pages=PAGES, transports=(transport,)) as all_ranks:
        Traffic(all_ranks, seed, counts).run(requests)


def _main() -> int:
    parser = argparse.ArgumentParser("handover_chaos", description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000, help="to be compared, at least")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    counts, nth, began_s = Counts(), 0, time.monotonic()
    while counts.pages < asked.pages:
        shape = list(SHAPES)[nth % len(SHAPES)]
        transport = TRANSPORTS[nth // len(SHAPES) % len(TRANSPORTS)]
        era(shape, transport, 100, asked.seed * 1_000_003 + nth, counts)
        nth += 1
        spent_s = time.monotonic() - began_s
        sys.stdout.write(f"{spent_s:6.0f} s, {shape} over {transport}: {counts}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
