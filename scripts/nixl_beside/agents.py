# SPDX-License-Identifier: Apache-2.0
"""The rows of two agents: what becomes of transfers whose peer stands still, ends or is cut off."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

from cpu_serving.severed import sever

from nixl_beside.processes import AgentError, AgentPair
from nixl_beside.rows import Ended, Landed, Lists, Spent

__all__ = ["SHAPES", "in_turn", "row"]

NBYTES: Final = 64 << 20
READS, READ_NBYTES = 20, 1 << 20
#: For what the peer has still to send once it goes on: 64 MiB take less than a second.
_SETTLES_S: Final = 3.0
_LATER: Final = 2


class Shape(NamedTuple):
    """Blocks of so many bytes; a fifth of the memory lies between them."""

    blocks: int
    nbytes: int

    @property
    def total_nbytes(self) -> int:
        return self.blocks * self.nbytes

    @property
    def memory_nbytes(self) -> int:
        return self.blocks * 5 // 4 * self.nbytes


SHAPES: Final = {"lists": Shape(32_768, 256), "post": Shape(200_000, 64)}


def silent(pair: AgentPair, patience_s: float) -> Ended:
    pair.far.signal(signal.SIGSTOP)
    pair.near.ask("post", "READ", pair.there, NBYTES)
    return Ended(*pair.near.ask("ended", patience_s, waits_s=patience_s))


def gone(pair: AgentPair, patience_s: float) -> Ended:
    pair.far.end()
    state = pair.near.ask("post", "READ", pair.there, NBYTES)
    if state != "PROC":
        return Ended(state, 0.0)
    return Ended(*pair.near.ask("ended", patience_s, waits_s=patience_s))


def read_released(pair: AgentPair, patience_s: float) -> Landed:
    pair.far.signal(signal.SIGSTOP)
    pair.near.ask("post", "READ", pair.there, NBYTES)
    released_s = pair.near.ask("released", patience_s, waits_s=patience_s)
    before = pair.near.ask("count", 1)
    pair.far.signal(signal.SIGCONT)
    time.sleep(_SETTLES_S)
    return Landed(pair.near.ask("count", 1) - before, NBYTES, released_s)


def write_released(pair: AgentPair, patience_s: float) -> Landed:
    pair.far.signal(signal.SIGSTOP)
    pair.near.ask("post", "WRITE", pair.there, NBYTES)
    released_s = pair.near.ask("released", patience_s, waits_s=patience_s)
    pair.near.ask("fill", _LATER)
    pair.far.signal(signal.SIGCONT)
    time.sleep(_SETTLES_S)
    return Landed(pair.far.ask("count", _LATER), NBYTES, released_s)


def cut(pair: AgentPair, patience_s: float) -> str:
    """How many reads were done."""
    if not sever(pair.near.pid, pair.far.pid):
        raise AgentError("there was no connection to sever")
    waits_s = READS * patience_s
    done = pair.near.ask("reads", pair.there, READ_NBYTES, READS, patience_s, waits_s=waits_s)
    return f"{done} of {READS} done"


_STEPS: Final[Mapping[str, Callable[[AgentPair, float], Ended | Landed | str]]] = {
    "silent": silent,
    "gone": gone,
    "read-released": read_released,
    "write-released": write_released,
    "cut": cut,
}


def row(name: str, contender: str, patience_s: float, log: Path) -> Ended | Landed | str:
    """Of one contender, by a pair of its own whose first read worked. Raises AgentError,
    contenders.Absent."""
    with AgentPair(contender, NBYTES, log) as pair:
        if pair.near.ask("reads", pair.there, READ_NBYTES, 1, patience_s, waits_s=patience_s) != 1:
            raise AgentError("the first read failed before there was any fault")
        pair.near.ask("fill", 0)
        return _STEPS[name](pair, patience_s)


def in_turn(name: str, contenders: Sequence[str], rounds: int, log: Path) -> Mapping[str, Lists]:
    """A row of `SHAPES` for each contender. Each round begins with another one, and one that does
    not count comes first. Raises AgentError, contenders.Absent."""
    shape = SHAPES[name]
    times: dict[str, list[tuple[float, float, float]]] = {one: [] for one in contenders}
    with ExitStack() as stack:
        pairs = {
            one: stack.enter_context(AgentPair(one, shape.memory_nbytes, log)) for one in contenders
        }
        for pair in pairs.values():
            pair.rest()
        for number in range(rounds + 1):
            first = number % len(contenders)
            for one in (*contenders[first:], *contenders[:first]):
                with pairs[one].going_on() as pair:
                    spent = pair.near.ask("lists", pair.there, shape.blocks, shape.nbytes, number)
                if number:
                    times[one].append(spent)
    return {
        one: Lists(*(Spent(column) for column in zip(*found, strict=True)), shape.total_nbytes)
        for one, found in times.items()
    }
