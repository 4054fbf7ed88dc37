# SPDX-License-Identifier: Apache-2.0
"""Headers on both sides of every bound in the table of the wire format, and peers by hand that
send them: over each kind of link, from each of its sides."""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
from collections.abc import Iterator
from typing import NamedTuple

from te_direct import NullEngine, RawDirectListener, RawDirectSource
from te_raw import TIMEOUT_S, RawListener, RawSource
from wire_spec.table import HEADER, RULES, Bounds, Over, Rule

import te
from te_bench._null import Wires

__all__ = [
    "PATHS",
    "TRANSPORTS",
    "Edge",
    "Path",
    "Violations",
    "edges",
    "links",
    "pack",
    "rules_on",
    "smallest",
    "violations",
]

TRANSPORTS = {Over.TCP: "tcp", Over.RINGS: "samehost", Over.RDMA: "rdma"}
WIDTHS = {one.name: one.width for one in HEADER.members}


class Path(NamedTuple):
    """A direction over a kind of link."""

    over: Over
    from_source: bool

    def __str__(self) -> str:
        return f"{self.over.name}-{'source' if self.from_source else 'destination'}"


PATHS = [Path(over, from_source) for over in Over for from_source in (True, False)]


def rules_on(path: Path) -> list[Rule]:
    """Of the frames that may go that way."""
    return [
        one for one in RULES if path.over & (one.source if path.from_source else one.destination)
    ]


def pack(kind: int, fields: dict[str, int]) -> bytes:
    return struct.pack(HEADER.format, *(({"kind": kind} | fields)[m.name] for m in HEADER.members))


def smallest(rule: Rule, **given: int) -> dict[str, int]:
    """A header with the least that each field may be beside what is given."""
    fields: dict[str, int] = {}
    for name, bounds in rule.bounds.items():
        floor = fields[bounds.floor] if bounds.floor else 0
        fields[name] = given.get(name, max(bounds.least, floor))
    return fields


def has_siblings(rule: Rule) -> bool:
    """Whether a side may send other frames of that kind over the same link."""
    return any(
        one.kind == rule.kind and one.source & rule.source | one.destination & rule.destination
        for one in RULES
        if one is not rule
    )


class Edge(NamedTuple):
    """A header that has one field at one of its bounds."""

    rule: Rule
    field: str
    given: dict[str, int]
    is_allowed: bool

    @property
    def fields(self) -> dict[str, int]:
        """With the least of all others."""
        return smallest(self.rule, **self.given)

    def __str__(self) -> str:
        return f"{self.rule.title} with {self.field} {self.given[self.field]}"


def edges(rule: Rule) -> Iterator[Edge]:
    """On, just inside and just outside each bound of each field."""
    for name, bounds in rule.bounds.items():
        if name == "status" and has_siblings(rule):
            continue  # It says which of them counts.
        for value in _around(name, bounds):
            is_allowed = bounds.least <= value <= bounds.most
            yield Edge(rule, name, {name: value}, is_allowed)
        if bounds.floor:
            floor = max(bounds.least + 1, 2)
            for value in (floor - 1, floor):
                yield Edge(rule, name, {bounds.floor: floor, name: value}, value == floor)


def _around(name: str, bounds: Bounds) -> list[int]:
    limit = 1 << 8 * WIDTHS[name]
    values = {end + step for end in (bounds.least, bounds.most) for step in (-1, 0, 1)}
    return sorted(value for value in values if 0 <= value < limit)


class Violations(logging.Handler):
    """The reasons for which links have ended because the other side broke the rules, one by one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def emit(self, record: logging.LogRecord) -> None:
        """Of `logging.Handler`."""
        _, said, reason = record.getMessage().partition(" broke the protocol: ")
        if said:
            self._reasons.put(reason)

    def next(self) -> str:
        """Waits for one."""
        return self._reasons.get(timeout=TIMEOUT_S)


@contextlib.contextmanager
def violations() -> Iterator[Violations]:
    """What te logs meanwhile."""
    logger, found = logging.getLogger("te"), Violations()
    logger.addHandler(found)
    try:
        yield found
    finally:
        logger.removeHandler(found)


class Links:
    """Makes one link after the other to an engine. Each ends before the next is made."""

    def __init__(self, path: Path, undo: contextlib.ExitStack) -> None:
        self._path, self._undo = path, undo
        self._wires = Wires()
        self._transport = transport = TRANSPORTS[path.over]
        self.engine: te.Engine = undo.enter_context(
            NullEngine(self._wires, nics=1, connect_timeout_s=TIMEOUT_S)
            if path.over is Over.RDMA
            else te.Engine(te.Config(transports=(transport,), connect_timeout_s=TIMEOUT_S))
        )
        if path.from_source:
            self._card = self.engine.card()
        elif path.over is Over.RDMA:
            self._direct = undo.enter_context(RawDirectListener(self._wires))
        else:
            self._bytes = undo.enter_context(RawListener(transport))

    @contextlib.contextmanager
    def send(self, data: bytes) -> Iterator[None]:
        """Opens a link by hand, and says that over it."""
        if self._path.over is Over.RDMA:
            if self._path.from_source:
                direct = contextlib.closing(RawDirectSource(self._card, self._wires))
                with direct as source:
                    source.send(data)
                    yield
                return
            _, raw = self._direct.connect(self.engine)
            raw.send(data)
            yield
            self._direct.forget(raw)
            return
        if self._path.from_source:
            sock = RawSource(self._card, self._transport).sock
        else:
            _, sock = self._bytes.connect(self.engine)
        with sock:
            sock.sendall(data)
            yield


@contextlib.contextmanager
def links(path: Path) -> Iterator[Links]:
    """To an engine that gets what goes that way."""
    with contextlib.ExitStack() as undo:
        yield Links(path, undo)
