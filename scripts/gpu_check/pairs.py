# SPDX-License-Identifier: Apache-2.0
"""Two processes that write to each other: every byte is looked at."""

from __future__ import annotations

from typing import Any, Final

from gpu_check.allocations import ALLOCATIONS
from gpu_check.child import Failed, Skipped, Task
from gpu_check.processes import SideProcess, connected, sides

__all__ = ["all_bytes", "allocations", "arrivals", "pieces_arrive"]

MEMORY_BYTES: Final = 96 << 20
LARGEST_BYTES: Final = 16 << 20
ROUNDS: Final = 4
#: Of the GPU on both sides, or on one.
PLACES: Final = (("plain", "plain"), ("plain", "host"), ("host", "plain"))
ARRIVAL_S: Final = 12.0
ARRIVAL_BYTES: Final = 20 << 10
TAG: Final = 0x6E0


def pieces_arrive(
    task: Task, source: SideProcess, target: SideProcess, what: str, seeds: range
) -> None:
    """Writes with a tag, whose arrival is counted, and a read."""
    largest = task.scaled(LARGEST_BYTES, 1 << 15)
    for seed in seeds:
        task.doing(f"{what}: writing, seed {seed}")
        source.post("fill", seed=seed)
        target.ask("guard")
        source.answer()
        target.ask("expect", tag=TAG)
        _must_be_done(source.ask("write", seed=seed, largest=largest, tag=TAG), what)
        if (count := target.ask("arrived", tag=TAG)) != 1:
            raise Failed(f"{what}: {count} arrivals instead of 1")
        _must_be_right(target, seed, largest, what)
        target.ask("fence", tag=TAG)
    seed = seeds.stop
    task.doing(f"{what}: reading")
    target.ask("fill", seed=seed)
    source.ask("guard")
    _must_be_done(source.ask("read", seed=seed, largest=largest), f"{what}, read")
    _must_be_right(source, seed, largest, f"{what}, read")


def _must_be_done(outcome: dict[str, Any], what: str) -> None:
    if outcome["status"] != "done":
        raise Failed(f"{what}: {outcome['status']}: {outcome['reason']}")


def _must_be_right(side: SideProcess, seed: int, largest: int, what: str) -> None:
    if wrong := side.ask("wrong_bytes", seed=seed, largest=largest):
        raise Failed(f"{what}: {wrong} wrong bytes with seed {seed}")


def all_bytes(task: Task, transport: str) -> dict[str, Any]:
    """Pieces of 1 B to 16 MiB at odd addresses."""
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    with sides(task, "source", "target") as (source, target):
        for number, places in enumerate(PLACES):
            what = f"{places[0]} to {places[1]} memory"
            task.doing(f"{what}: connecting")
            connected(source, target, transport, places, nbytes)
            seeds = range(100 * number, 100 * number + task.scaled(ROUNDS))
            pieces_arrive(task, source, target, what, seeds)
    return {"found": {"memory_nbytes": nbytes, "places": [" to ".join(one) for one in PLACES]}}


def allocations(task: Task, transport: str) -> dict[str, Any]:
    """GPU to GPU, from memory of each kind into memory of the same."""
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    found = {}
    with sides(task, "source", "target") as (source, target):
        for number, name in enumerate(ALLOCATIONS):
            task.doing(f"{name}: connecting")
            try:
                connected(source, target, transport, (name, name), nbytes)
            except Skipped as exc:
                found[name] = str(exc)
                continue
            seeds = range(500 + 10 * number, 501 + 10 * number)
            pieces_arrive(task, source, target, name, seeds)
            found[name] = "every byte right"
    return {"found": found}


def arrivals(task: Task, transport: str) -> dict[str, Any]:
    """Work that is begun as soon as the arrival is told sees what has arrived, never the poison
    before it."""
    found = {}
    seconds = ARRIVAL_S * task.scale
    with sides(task, "source", "target") as (source, target):
        for places in (("plain", "plain"), ("host", "plain")):
            what = f"{places[0]} to {places[1]} memory"
            task.doing(f"arrivals, {what}")
            connected(source, target, transport, places, ARRIVAL_BYTES)
            target.ask("expect", tag=TAG)
            target.ask("guard")
            target.post("look_at_rounds", tag=TAG)
            source.post("send_rounds", tag=TAG, seconds=seconds)
            looked = target.answer()
            if looked["old_words"]:
                raise Failed(
                    f"{what}: {looked['old_words']} words were older than their arrival, in round"
                    f" {looked['rounds']}"
                )
            if (sent := source.answer()) != looked["rounds"]:
                raise Failed(f"{what}: of {sent} rounds {looked['rounds']} were seen")
            found[what] = looked["rounds"]
    return {"found": {"rounds": found}}
