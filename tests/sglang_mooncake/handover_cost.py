# SPDX-License-Identifier: Apache-2.0
"""What digests cost a hand-over between two ranks of one process, over real engines and sockets:
requests with and without them take turns, so that both meet the same machine.

    .venv/bin/python tests/sglang_mooncake/handover_cost.py

With `sample`, one request of 256 has digests, and for the others a number is drawn and nothing
else is done. So those that have digests are measured, and a 256th of what they take longer is the
cost: the noise of a machine would hide it in a comparison of all requests with others.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from fleet import Model, RankMemory
from handover import Handover, handover, until

from sglang_mooncake.layout import ALONE, Verify
from sglang_mooncake.layout.chosen import SAMPLE_ROOMS
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.rooms.states import RoomState
from sglang_mooncake.sglang.config import Config

#: 16 KiB a page in a layer of K or V; 16 MiB a request.
MODEL = Model(heads=8, head_nbytes=512, layers=16)
PAGES, PAGE_NBYTES = 32, 16 << 10
AT_ONCE = (1, 4)
#: Requests of which everything is digested take several times as long: so many fewer of them.
ALL_PART = 20
RESAMPLES = 1_000
_POLL_S = 2e-5

Floats = npt.NDArray[np.float64]


@dataclass
class Bench:
    """Each batch hands over `at_once` requests, each from pages and to pages of its own."""

    pair: Handover
    at_once: int
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def seconds(self, verify: Verify) -> float:
        """From the first `send` until the last request has arrived."""
        # The stricter wish of two counts, and the prefill rank has none. Each request is drawn.
        self.pair.decode.side._rooms._verify = verify
        self.pair.prefill.side._rooms._random = lambda: 0
        rooms = [self._ready(nth) for nth in range(self.at_once)]
        began_s = time.perf_counter()
        for nth, (source, _) in enumerate(rooms):
            self.pair.prefill.send(source, self._pages(nth), 0, aux_slot=nth)
        side = self.pair.decode.side
        waiting = [target for _, target in rooms]
        while waiting:
            waiting = [one for one in waiting if not self._has_arrived(one)]
            time.sleep(_POLL_S)
        took_s = time.perf_counter() - began_s
        for source, target in rooms:
            side.arrived(target)
            until(lambda of=source: of.view.over, "the prefill side is done")
            until(lambda of=target: of.view.over, "the decode side is done")
        return took_s

    def _has_arrived(self, room: Room) -> bool:
        if room.view.over:
            raise RuntimeError(f"room {room.number} has failed: {room.view.reason}")
        return self.pair.decode.side.has_arrived(room)

    def _pages(self, nth: int) -> list[int]:
        return list(range(nth * PAGES, (nth + 1) * PAGES))

    def _ready(self, nth: int) -> tuple[Room, Room]:
        source, target = self.pair.open_both(next(self._numbers))
        self.pair.name_pages(target, self._pages(nth)[::-1], aux=nth)
        until(lambda: source.view.state is RoomState.READY, "the prefill room is ready")
        return source, target


def measured(transport: str, at_once: int, pairs: int) -> tuple[Floats, Floats, Floats, int]:
    """Seconds of batches without digests, with digests of a sample's cells, and with those of all;
    how many requests were compared."""
    config = Config(transports=(transport,))
    memory = [RankMemory(MODEL, ALONE, at_once * PAGES) for _ in range(2)]
    memory[0].kv[:] = np.random.default_rng(0).integers(0, 256, memory[0].kv.shape, np.uint8)
    with handover(
        config,
        source=memory[0],
        target=memory[1],
        decode_config=config,
        verify=(Verify.OFF, Verify.OFF),
    ) as pair:
        pair.decode.know(pair.address)
        found = _batches(Bench(pair, at_once), pairs)
        compared = int(pair.decode.recorder.totals()["digests"]["equal"])
    off, drawn, all_ = (np.array(found[verify]) for verify in Verify)
    return off, drawn, all_, compared


def _batches(bench: Bench, pairs: int) -> dict[Verify, list[float]]:
    kinds = (Verify.OFF, Verify.SAMPLE)
    for verify in Verify:  # connections, and memory that nobody has touched
        bench.seconds(verify)
    found: dict[Verify, list[float]] = {verify: [] for verify in Verify}
    for nth in range(pairs):
        for verify in kinds if nth % 2 else kinds[::-1]:
            found[verify].append(bench.seconds(verify))
        if nth % ALL_PART == 0:
            found[Verify.ALL].append(bench.seconds(Verify.ALL))
    return found


def cost(off: Floats, drawn: Floats) -> str:
    """What a request of which one in `SAMPLE_ROOMS` is drawn takes longer, in the mean, and between
    what that lies 95 times of 100."""
    random = np.random.default_rng(0)
    resampled = (random.integers(len(off), size=len(off)) for _ in range(RESAMPLES))
    spread = [drawn[at].mean() / off[at].mean() - 1 for at in resampled]
    low, high = np.quantile(spread, [0.025, 0.975]) / SAMPLE_ROOMS
    mean = (drawn.mean() / off.mean() - 1) / SAMPLE_ROOMS
    return f"{mean:.2%} ({low:.2%} to {high:.2%})"


def report(
    transport: str, at_once: int, off: Floats, drawn: Floats, all_: Floats, compared: int
) -> str:
    nbytes = at_once * PAGES * len(MODEL.kinds) * MODEL.layers * PAGE_NBYTES
    if at_once == 1:
        what = "mean"
        figures = [f"{1e3 * one.mean():.2f} ms" for one in (off, drawn, all_)]
    else:
        what = "rate"
        figures = [f"{nbytes / one.mean() / 1e9:.3f} GB/s" for one in (off, drawn, all_)]
    return (
        f"{transport}, {at_once} at a time, {what}: off {figures[0]}, with a sample's digests "
        f"{figures[1]}, with all {figures[2]}; of {len(off)} pairs, {compared} requests compared; "
        f"what sample costs: {cost(off, drawn)}\n"
    )


def _main() -> int:
    parser = argparse.ArgumentParser("handover_cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="of batches, for each figure")
    parser.add_argument("--transports", default="tcp,samehost")
    asked = parser.parse_args()
    logging.disable()  # of ranks that lose each other when both are closed
    for transport, at_once in itertools.product(asked.transports.split(","), AT_ONCE):
        figures = measured(transport, at_once, asked.pairs)
        sys.stdout.write(report(transport, at_once, *figures))
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(_main())
