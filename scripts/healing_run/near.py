# SPDX-License-Identifier: Apache-2.0
"""The source: `python -m healing_run.near` reads a `Setup` and a `Card`, writes small transfers at
a steady pace, and prints a `Log` when its standard input ends. Another card means that the
destination was started again. It says `flows` once bytes do.

A transfer that fails is counted and not sent again, and a lost peer is connected anew, as the
hand-over does.
"""

from __future__ import annotations

import base64
import sys
import threading
import time
from collections import deque

import msgspec
import numpy as np

import te
from healing_run.far import NBYTES, PLACES, config
from healing_run.messages import Card, Log, Moved, RailChange, Setup

__all__: list[str] = []

#: One transfer for each so many seconds: 32 MB/s over TCP, where the figures have to be fine. The
#: testbed has one processor for both sides.
_PACE_S = {"tcp": 0.002, "rdma": 0.005}
_LOOK_S = 0.0005
_FLOWS = 200


class Source:
    """Transfers, and what becomes of them."""

    def __init__(self, engine: te.Engine, card: Card, pace_s: float) -> None:
        self._engine, self._pace_s = engine, pace_s
        self._memory = np.zeros(NBYTES * PLACES, np.uint8)
        self._region = engine.register(self._memory, remote="none")
        self._under_way: deque[tuple[float, te.Transfer]] = deque()
        self._states: dict[str, str] = {}
        self._stop = threading.Event()
        self.card = card
        self.moved: list[Moved] = []
        self.rails: list[RailChange] = []
        self._peer: te.Peer | None = engine.connect(base64.b64decode(card.card))

    def run(self, until: threading.Event) -> None:
        due_s, place = time.monotonic(), 0
        said = False
        while not until.is_set():
            self._look()
            if (now_s := time.monotonic()) >= due_s:
                self._begin(now_s, place)
                place = (place + 1) % PLACES
                due_s = max(due_s + self._pace_s, now_s - self._pace_s)
            if not said and len(self.moved) >= _FLOWS:
                said = True
                sys.stdout.write("flows\n")
                sys.stdout.flush()
            time.sleep(_LOOK_S)

    def _begin(self, now_s: float, place: int) -> None:
        if self._peer is None or not self._peer.alive:
            self._reconnect(now_s)
        if self._peer is None:
            return
        offset = place * NBYTES
        source, target = self._region.address + offset, self.card.address + offset
        try:
            transfer = self._peer.write(te.Blocks.of([source], [target], NBYTES))
            self._under_way.append((now_s, transfer))
        except te.Error as error:
            self.moved.append(Moved(now_s, time.monotonic(), str(error)))

    def _reconnect(self, now_s: float) -> None:
        self._peer = None
        try:
            self._peer = self._engine.connect(base64.b64decode(self.card.card))
        except te.Error as error:
            self.moved.append(Moved(now_s, time.monotonic(), str(error)))

    def _look(self) -> None:
        """At transfers, and at rails."""
        for _ in range(len(self._under_way)):
            began_s, transfer = self._under_way.popleft()
            status = transfer.poll()
            if status is te.Status.PENDING:
                self._under_way.append((began_s, transfer))
            else:
                error = "" if status is te.Status.DONE else transfer.reason or status.name
                self.moved.append(Moved(began_s, time.monotonic(), error))
        if self._peer is None:
            return
        now_s = time.monotonic()
        for rail in self._peer.stats().rails:
            if self._states.get(rail.name) != rail.state:
                self._states[rail.name] = rail.state
                self.rails.append(RailChange(now_s, rail.name, rail.state))


def _listen(source: Source, until: threading.Event) -> None:
    for line in sys.stdin.buffer:
        source.card = msgspec.json.decode(line, type=Card)
    until.set()


def main() -> None:
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    card = msgspec.json.decode(sys.stdin.buffer.readline(), type=Card)
    until = threading.Event()
    with te.Engine(config(setup)) as engine:
        source = Source(engine, card, _PACE_S["rdma" if setup.nics else "tcp"])
        threading.Thread(target=_listen, args=(source, until), daemon=True).start()
        source.run(until)
        sys.stdout.buffer.write(msgspec.json.encode(Log(source.moved, source.rails)))


if __name__ == "__main__":
    main()
