# SPDX-License-Identifier: Apache-2.0
"""The table of the wire format (``te/core/wire.h``) with names: what the frames between engines may
be. The plane itself checks by the compiled table; this view of it is for docs/wire.md and tests."""

from __future__ import annotations

from enum import IntFlag
from typing import NamedTuple

from te_bench._wire import (
    check_frame,
    frame_layouts,
    frame_limits,
    frame_rules,
    ring_layout,
    ring_limits,
)

__all__ = [
    "HEADER",
    "LIMITS",
    "RING",
    "RULES",
    "Bounds",
    "Layout",
    "Member",
    "Over",
    "Rule",
    "check",
]


class Over(IntFlag):
    """Kinds of link."""

    TCP = 1
    #: Same host: two rings in memory that both sides have mapped.
    RINGS = 2
    #: Words about RDMA.
    RDMA = 4


class Member(NamedTuple):
    """A field of a struct: ``length`` unsigned integers of ``width`` bytes, from ``offset`` on."""

    name: str
    offset: int
    width: int
    length: int
    means: str


class Layout(NamedTuple):
    """A struct, little-endian and without padding."""

    name: str
    nbytes: int
    members: tuple[Member, ...]

    @property
    def format(self) -> str:
        """For ``struct``."""
        codes = {1: "B", 2: "H", 4: "I", 8: "Q"}
        return "<" + "".join(codes[one.width] * one.length for one in self.members)


class Bounds(NamedTuple):
    """What a field of a header may be: from ``least`` to ``most``, and not below the field
    ``floor`` of the same header, if there is one."""

    least: int
    most: int
    floor: str | None
    #: Empty if it means nothing; then it is 0.
    means: str


class Rule(NamedTuple):
    """A frame as one side sends it. The source is the side that dialled the link."""

    kind: int
    name: str
    #: Which of several frames of the kind; empty if there is one, or it is the ordinary one.
    variant: str
    source: Over
    destination: Over
    #: What ``count`` counts; None if nothing follows the header.
    item: Layout | None
    #: Whether ``nbytes`` bytes follow, and a trailer.
    has_payload: bool
    says: str
    #: By the names of the header's fields; all but ``kind``.
    bounds: dict[str, Bounds]

    @property
    def title(self) -> str:
        """The kind, and which of its frames."""
        return f"{self.name} {self.variant}".rstrip()


def check(header: bytes, over: Over, from_source: bool) -> int | str:
    """What the plane makes of a header that came over such a link: how many bytes of items follow
    it, or a sentence of what is wrong. ``ValueError`` for other than ``HEADER.nbytes`` bytes."""
    return check_frame(header, over, from_source)


def _layout(name: str, nbytes: int, members: list[tuple[str, int, int, int, str]]) -> Layout:
    return Layout(
        name,
        nbytes,
        tuple(Member(n, at, size // length, length, says) for n, at, size, length, says in members),
    )


def _read() -> tuple[Layout, tuple[Rule, ...]]:
    header, *items = [_layout(*one) for one in frame_layouts()]
    names = [one.name for one in header.members]
    rules = []
    for kind, name, variant, source, destination, item, has_payload, says, bounds in frame_rules():
        named = {
            names[i]: Bounds(least, most, names[floor] if floor else None, means)
            for i, (least, most, floor, means) in enumerate(bounds, start=1)
        }
        layout = items[item - 1] if item else None
        rules.append(
            Rule(
                kind, name, variant, Over(source), Over(destination), layout, has_payload, says,
                named,
            )
        )  # fmt: skip
    return header, tuple(rules)


HEADER, RULES = _read()
"""What every frame begins with, and the rules for each that there is."""

LIMITS = frame_limits() | ring_limits()
"""Numbers of the format by their names in the plane."""

RING = ring_layout()
"""Offsets in the head of a ring by name: positions of 8 bytes, flags of 4."""
