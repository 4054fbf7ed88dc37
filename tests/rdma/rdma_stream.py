# SPDX-License-Identifier: Apache-2.0
"""Two engines on the two halves of the testbed's devices, and transfers that never stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from testbed_nics import Nic, wait_for

import te

__all__ = ["NEVER_S", "RATE", "Stream", "device_of", "engine", "rail_of", "two_engines"]

PAGE = 16 << 10
PAGES = 512
WAIT_S = 60.0
#: A timeout that must not fire, however long a thread of the emulated machine stands still.
NEVER_S = 600.0
#: Of each link: transfers take long enough for a fault to meet them on their way. Soft devices
#: drop what they cannot queue, so the queue holds more packets than are ever under way.
RATE = ("netem", "rate", "100mbit", "limit", "20000")


@contextmanager
def engine(
    nics: Sequence[Nic],
    stall_timeout_s: float = NEVER_S,
    topology: Path | None = None,
    **changes: Any,
) -> Iterator[te.Engine]:
    """One that can use these devices, or those of the topology, and no other transport."""
    config = te.Config(
        transports=("rdma",),
        nics=() if topology else tuple(nic.device for nic in nics),
        topology=topology,
        rails=len(nics),
        stall_timeout_s=stall_timeout_s,
        connect_timeout_s=WAIT_S,
        **changes,
    )
    with te.Engine(config) as made:
        yield made


@contextmanager
def two_engines(
    near: Sequence[Nic],
    far: Sequence[Nic],
    stall_timeout_s: float = NEVER_S,
    topology: Path | None = None,
    **changes: Any,
) -> Iterator[tuple[te.Engine, te.Engine]]:
    """A source, maybe with a topology of its own, and a destination."""
    with (
        engine(near, stall_timeout_s, topology, **changes) as source,
        engine(far, stall_timeout_s, **changes) as target,
    ):
        yield source, target


def device_of(rail: te.RailStats) -> str:
    """The near one."""
    return rail.name.split()[0]


def rail_of(peer: te.Peer, nic: Nic) -> te.RailStats:
    """The rail that leaves by the device."""
    (found,) = [rail for rail in peer.stats().rails if device_of(rail) == nic.device]
    return found


class Stream:
    """Transfers of scattered pages one after the other, each with bytes of its own, each checked
    on arrival: also that nothing of an earlier one lands late."""

    def __init__(self, source: te.Engine, target: te.Engine, location: str | None = None) -> None:
        self._random = np.random.default_rng(4)
        self._src = np.zeros(PAGES * PAGE, np.uint8)
        self._dst = np.zeros(PAGES * PAGE, np.uint8)
        self._source_region = source.register(self._src, location=location, remote="none")
        self.target_region = target.register(self._dst)
        self.nbytes = self._dst.size
        self._source, self._target = source, target
        self.connect()
        self.done = 0
        #: Why transfers failed.
        self.failures: list[str] = []
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(2 * WAIT_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def connect(self) -> None:
        """Finds the destination, also if it has been lost; returns when every rail is up."""
        self.peer = self._source.connect(self._target.card())
        wait_for(
            lambda: self.rails_up() == len(self.peer.stats().rails), WAIT_S, "every rail is up"
        )

    def go_on(self, count: int = 3) -> None:
        """Returns when so many more transfers have arrived."""
        wanted = self.done + count
        wait_for(
            lambda: self.done >= wanted or self._error is not None,
            WAIT_S,
            f"{count} more transfers; failed: {self.failures}",
        )

    def rails_up(self) -> int:
        """How many rails carry, or would."""
        return self.peer.rails

    def begin(self, tag: int, count: int = PAGES) -> te.Transfer:
        """A transfer of so many pages, in a random order."""
        self._pages = self._random.permutation(PAGES)[:count]
        offsets = (self._pages * PAGE).astype(np.uint64)
        blocks = te.Blocks.of(
            np.uint64(self._source_region.address) + offsets,
            np.uint64(self.target_region.address) + offsets[::-1],
            PAGE,
        )
        self._target.expect(tag)
        return self.peer.write(blocks, tag=tag)

    def once(self, tag: int) -> None:
        """One transfer of new bytes, all of which must arrive; ``te.TransferFailed``."""
        self._src[:] = np.frombuffer(self._random.bytes(self._src.size), np.uint8)
        transfer = self.begin(tag)
        try:
            transfer.wait(WAIT_S)
            assert self._target.arrived(tag) == 1
        finally:
            self._target.fence(tag)
        sent = self._src.reshape(PAGES, PAGE)[self._pages]
        landed = self._dst.reshape(PAGES, PAGE)[self._pages[::-1]]
        wrong = np.flatnonzero((sent != landed).any(axis=1))
        assert not len(wrong), f"transfer {tag}: {len(wrong)} of {PAGES} pages differ"

    def _run(self) -> None:
        tag = 0
        try:
            while not self._stop.is_set():
                tag += 1
                try:
                    self.once(tag)
                    self.done += 1
                except te.TransferFailed as exc:
                    self.failures.append(str(exc))
                    time.sleep(0.05)  # a dead rail refuses at once
        except BaseException as exc:  # noqa: BLE001 - told by __exit__
            self._error = exc
