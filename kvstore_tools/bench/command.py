# SPDX-License-Identifier: Apache-2.0
"""The command ``kvstore bench``: rounds that alternate between the contenders, medians of them,
and ratios to the first peer. What a get brings is compared after each."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import te
from kvstore_tools.bench import disk
from kvstore_tools.bench.contenders import CONTENDERS, Absent, Contender, Objects, names_of

__all__ = ["DESCRIPTION", "add_arguments", "await_rest", "busy_percent", "run", "table"]

DESCRIPTION: Final = (
    "Puts and gets objects of three sizes, alone and in batches, and asks for the existence of"
    " 1,000: here, and with the peers that are installed. The client and the memory are in two"
    " processes of this host; with 'ours tcp', which needs Redis, objects are put on one host, lie"
    " on another and are got on a third one: as many owners, each a process here. GB are 10^9"
    " bytes."
)
#: (bytes, objects in a call)
SHAPES: Final = ((4096, 1), (4096, 32), (1 << 20, 1), (1 << 20, 32), (16 << 20, 1), (16 << 20, 8))
DISK_OBJECT_BYTES: Final = 2 << 20
DISK_BATCH: Final = 16
ASKED: Final = 1000
LENT_BYTES: Final = 4 << 30
"""Mooncake keeps what was removed until its lease has ended, for 10 s."""
REST_S: Final = 30.0
"""The processors are waited for so long: for some seconds the kernel gives owners their memory."""
BUSY_PERCENT: Final = 20.0
"""Of all processors: what a measurement is not disturbed by."""

Figures = Mapping[str, Mapping[str, float]]
"""By row, then by contender: GB/s, or millions of keys a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the subcommand."""
    peers = sorted(set(CONTENDERS) - {"ours"})
    parser.add_argument(
        "--peers", default="", help=f"to measure beside: {', '.join(peers)}, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--disk",
        type=Path,
        help="measure what a disk gives through the store instead: a folder on it, which gets 3 GB"
        " for that time",
    )
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    if options.disk is not None:
        rates = disk.measure(options.disk, DISK_OBJECT_BYTES, DISK_BATCH, options.rounds)
        print(json.dumps(rates, indent=1) if options.json else disk.text(rates))  # noqa: T201
        return 0
    wanted = ["ours", *filter(None, options.peers.split(","))]
    unknown = sorted(set(wanted) - set(CONTENDERS))
    if unknown or options.rounds < 1:
        raise ValueError(f"unknown peers {unknown}, or rounds={options.rounds} below 1")
    largest = max(nbytes * count for nbytes, count in SHAPES)
    buffer = te.allocate(2 * largest)
    memory = np.frombuffer(buffer, np.uint8)
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    contenders: list[Contender] = []
    try:
        for peer, kind in ((one, kind) for one in wanted for kind in CONTENDERS[one]):
            try:
                contenders.append(kind(memory, LENT_BYTES))
            except Absent as exc:
                sys.stderr.write(f"kvstore bench: {kind.name} is left out: {exc}\n")
                if peer != "ours":  # It was asked for.
                    return 1
        busy = await_rest(busy_percent, REST_S)
        if busy > BUSY_PERCENT:
            sys.stderr.write(f"kvstore bench: others keep {busy:.0f} % of the processors busy\n")
        figures = _measure(contenders, memory, options.rounds)
    finally:
        for one in contenders:
            one.close()
    print(json.dumps(figures, indent=1) if options.json else table(figures))  # noqa: T201
    return 0


def await_rest(
    busy: Callable[[], float], timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> float:
    """Until no more than ``BUSY_PERCENT`` of the processors are busy, or the time has passed.
    Returns how many per cent are. ``busy`` waits, and tells how many were meanwhile."""
    until_s = clock() + timeout_s
    while (found := busy()) > BUSY_PERCENT and clock() < until_s:
        pass
    return found


def busy_percent() -> float:
    """For a second. Source: proc_stat(5)."""

    def used() -> tuple[int, int]:
        times = [int(one) for one in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
        idle, waiting = times[3:5]
        return sum(times) - idle - waiting, sum(times)

    before, all_before = used()
    time.sleep(1.0)
    after, all_after = used()
    return 100 * (after - before) / max(1, all_after - all_before)


@dataclass
class _Clock:
    """Collects figures: (row, contender) → one for each round."""

    found: defaultdict[str, defaultdict[str, list[float]]]

    def add(self, row: str, contender: str, amount: float, seconds: float) -> None:
        self.found[row][contender].append(amount / seconds)


def _measure(
    contenders: Sequence[Contender], memory: npt.NDArray[np.uint8], rounds: int
) -> dict[str, dict[str, float]]:
    clock = _Clock(defaultdict(lambda: defaultdict(list)))
    seeds = itertools.count()
    for _ in range(rounds):
        for nbytes, count in SHAPES:
            for one in contenders:
                _objects(one, memory, nbytes, count, next(seeds), clock)
            _memcpy(memory, nbytes, count, clock)
        for one in contenders:
            _existence(one, memory, next(seeds), clock)
    return {
        row: {name: statistics.median(values) for name, values in each.items()}
        for row, each in clock.found.items()
    }


def _halves(
    memory: npt.NDArray[np.uint8], nbytes: int, count: int
) -> Iterator[npt.NDArray[np.uint8]]:
    middle = len(memory) // 2
    for start in (0, middle):
        yield memory[start : start + nbytes * count].reshape(count, nbytes)


def _objects(
    one: Contender,
    memory: npt.NDArray[np.uint8],
    nbytes: int,
    count: int,
    seed: int,
    clock: _Clock,
) -> None:
    source, back = _halves(memory, nbytes, count)
    # Small calls are repeated, with other names, so that one slow wake-up does not decide.
    for repeat in range(20 if nbytes * count < 1 << 20 else 3):
        names = names_of(count, seed * 100 + repeat)
        label = f"{_size(nbytes)} × {count}"
        begun_s = time.perf_counter()
        stored = one.put(Objects(names, source))
        clock.add(f"put {label}", one.name, nbytes * count / 1e9, time.perf_counter() - begun_s)
        _need(stored == count, one, f"stored {stored} of {count} objects of {nbytes} bytes")
        _await_existence(one, names, nbytes)
        back[:] = 0
        begun_s = time.perf_counter()
        came = one.get(Objects(names, back))
        clock.add(f"get {label}", one.name, nbytes * count / 1e9, time.perf_counter() - begun_s)
        _need(came == count, one, f"gave {came} of {count} objects of {nbytes} bytes")
        _need(bool((back == source).all()), one, "gave other bytes than were stored")
        one.remove(names)


def _memcpy(memory: npt.NDArray[np.uint8], nbytes: int, count: int, clock: _Clock) -> None:
    source, back = _halves(memory, nbytes, count)
    begun_s = time.perf_counter()
    back[:] = source
    seconds = time.perf_counter() - begun_s
    clock.add(f"get {_size(nbytes)} × {count}", "memcpy", nbytes * count / 1e9, seconds)


def _existence(one: Contender, memory: npt.NDArray[np.uint8], seed: int, clock: _Clock) -> None:
    source, _ = _halves(memory, 4096, ASKED)
    names = names_of(ASKED, seed * 100 + 50)
    _need(one.put(Objects(names, source)) == ASKED, one, "did not store 1,000 objects")
    _await_existence(one, names, 4096)
    for _ in range(10):
        begun_s = time.perf_counter()
        found = one.exists(names)
        clock.add(f"exists {ASKED}, M/s", one.name, ASKED / 1e6, time.perf_counter() - begun_s)
        _need(found == ASKED, one, f"knows of {found} objects of {ASKED}")
    one.remove(names)


def _await_existence(one: Contender, names: Sequence[str], nbytes: int) -> None:
    """A client of ours hears of what others hold a little later."""
    one.size = nbytes
    deadline_s = time.monotonic() + 10.0
    while one.exists(names) < len(names):
        _need(time.monotonic() < deadline_s, one, "does not know of what was stored")
        time.sleep(0.0005)


def _need(condition: bool, one: Contender, what: str) -> None:
    if not condition:
        raise RuntimeError(f"{one.name} {what}")


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def table(figures: Figures) -> str:
    """Text: a row for each shape, a column for each contender."""
    names = list(dict.fromkeys(name for each in figures.values() for name in each))
    width = max(len(row) for row in figures)
    lines = ["GB/s".ljust(width) + "".join(name.rjust(12) for name in names)]
    for row, each in figures.items():
        cells = (f"{each[name]:.3g}" if name in each else "" for name in names)
        lines.append(row.ljust(width) + "".join(cell.rjust(12) for cell in cells))
    return "\n".join(lines)
