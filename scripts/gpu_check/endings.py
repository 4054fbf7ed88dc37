# SPDX-License-Identifier: Apache-2.0
"""Transfers that end in their middle: nothing of them lands afterwards."""

from __future__ import annotations

from typing import Any, Final

from gpu_check.child import Failed, Task
from gpu_check.pairs import LARGEST_BYTES, MEMORY_BYTES, TAG, pieces_arrive
from gpu_check.processes import SideProcess, connected, sides

__all__ = ["cancels", "fences", "kills", "remaps"]

#: Transfers of all of the memory, 48 GiB: tens of ms even at a GPU's own rate, so that whoever is
#: stopped is stopped in its middle.
FLOOD: Final = 512
REMAP_BYTES: Final = 32 << 20
ROUNDS: Final = 6
QUIET_S: Final = 0.2
PLACES: Final = ("plain", "plain")


def _nothing_lands(target: SideProcess, what: str, quiet_s: float) -> None:
    """Any more, in memory that is guarded."""
    if touched := target.ask("touched_bytes", wait_s=quiet_s):
        raise Failed(f"{what}: {touched} bytes were written afterwards")


def _flooded(source: SideProcess, target: SideProcess, tag: int) -> None:
    target.ask("expect", tag=tag)
    source.ask("flood", count=FLOOD, tag=tag)


def cancels(task: Task, transport: str) -> dict[str, Any]:
    """What the source cancels does not land after it was told so."""
    counts: dict[str, int] = {}
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    with sides(task, "source", "target") as (source, target):
        connected(source, target, transport, PLACES, nbytes)
        for number in range(task.scaled(ROUNDS, 2)):
            task.doing(f"cancelling, round {number}")
            _flooded(source, target, TAG + number)
            for status, count in source.ask("cancel").items():
                counts[status] = counts.get(status, 0) + count
            target.ask("guard")
            _nothing_lands(target, "after cancel", QUIET_S * task.scale)
            target.ask("fence", tag=TAG + number)
        if counts.get("failed") or not counts.get("cancelled"):
            raise Failed(f"what was cancelled in its middle ended as {counts}")
        pieces_arrive(task, source, target, "after all", range(1))
    return {"found": {"outcomes": counts}}


def fences(task: Task, transport: str) -> dict[str, Any]:
    """What the target fences does not land after the fence."""
    times_s = []
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    with sides(task, "source", "target") as (source, target):
        connected(source, target, transport, PLACES, nbytes)
        for number in range(task.scaled(ROUNDS, 2)):
            task.doing(f"fencing, round {number}")
            _flooded(source, target, TAG + number)
            times_s.append(target.ask("fence", tag=TAG + number))
            target.ask("guard")
            if not (outcomes := source.ask("settle")).get("failed"):
                raise Failed(f"what was fenced in its middle ended as {outcomes}")
            _nothing_lands(target, "after fence", QUIET_S * task.scale)
        pieces_arrive(task, source, target, "after all", range(1))
    return {"found": {"fence_ms_max": 1e3 * max(times_s)}}


def kills(task: Task, transport: str) -> dict[str, Any]:
    """kill -9 of the source, then of the target, in the middle of copies: the other one goes on."""
    nbytes = task.scaled(MEMORY_BYTES, 1 << 20)
    with sides(task, "source", "target", "third") as (source, target, third):
        task.doing("killing the source")
        connected(source, target, transport, PLACES, nbytes)
        _flooded(source, target, TAG)
        source.kill()
        target.ask("fence", tag=TAG)
        target.ask("guard")
        _nothing_lands(target, "after the source was killed", QUIET_S * task.scale)
        task.doing("going on with another source")
        connected(third, target, transport, PLACES, nbytes)
        pieces_arrive(task, third, target, "another source", range(1))
        task.doing("killing the target")
        _flooded(third, target, TAG)
        target.kill()
        if not (outcomes := third.ask("settle")).get("failed"):
            raise Failed(f"transfers to a target that was killed ended as {outcomes}")
    with sides(task, "source", "target") as (source, target):
        task.doing("going on with two others")
        connected(source, target, transport, PLACES, nbytes)
        pieces_arrive(task, source, target, "two others", range(1))
    return {"found": {"outcomes_after_the_target_was_killed": outcomes}}


def remaps(task: Task, transport: str) -> dict[str, Any]:
    """Memory that is given back while the other side may have it mapped, and comes back as other
    memory at the same addresses."""
    nbytes = task.scaled(REMAP_BYTES, 1 << 20)
    largest = task.scaled(LARGEST_BYTES, 1 << 15)
    freed = []
    with sides(task, "source", "target") as (source, target):
        for name in ("virtual-fd", "virtual-private"):
            connected(source, target, transport, (name, name), nbytes)
            for number in range(2):
                # The source's goes when the target has it mapped, and the other way round.
                for side, who in ((source, "source"), (target, "target")):
                    what = f"{name}, the {who}'s memory, round {number}"
                    pieces_arrive(task, source, target, what, range(number, number + 1))
                    task.doing(f"{what}: taking it away")
                    freed.append(side.ask("take_memory_away"))
                    if freed[-1] < nbytes:
                        raise Failed(f"{what}: only {freed[-1]} of {nbytes} bytes were given back")
                    if side is target:
                        outcome = source.ask("write", seed=0, largest=largest, tag=0)
                        if outcome["status"] != "failed":
                            raise Failed(f"{what}: a write ended as {outcome['status']}")
                    side.ask("bring_memory_back")
                    pieces_arrive(task, source, target, f"{what}, back", range(10, 11))
    return {"found": {"freed_nbytes": freed}}
